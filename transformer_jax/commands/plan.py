"""`transformer-jax plan CONFIG --topology v5e:4x4 [--flags]`: what a train step takes, compiled without the devices."""

import dataclasses
import json
from collections.abc import Sequence

import jax
from rich.console import Console

from transformer_jax.commands.parsing import parse, take_fields
from transformer_jax.commands.plan_table import print_plan
from transformer_jax.commands.train import parse_config
from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import chip_named
from transformer_jax.parallel.host import simulate_devices
from transformer_jax.parallel.topology import tpu_devices
from transformer_jax.training.plan import make_plan
from transformer_jax.training.remedies import with_remedy

NUM_DEVICES = 8  # that are simulated by default


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Compile the train step of a config for devices that need not be here, and print what it takes on each of them."""

    topology: str | None = None
    """TPU topology to compile for, such as v5e:4x4 for 16 chips of TPU v5e. Needs the extra [tpu], and no TPU."""
    slices: int = 1
    """Number of slices of that topology, which the network of the data center connects."""
    devices: int | None = None
    """Number of CPU devices to simulate instead of a topology; 8 by default."""
    chip: str | None = None
    """Accelerator that the simulated devices stand for, such as H100 or v5p, to estimate the time of a step."""
    json: bool = False
    """Print one JSON object, and no table."""

    def __post_init__(self) -> None:
        if self.topology is not None and (self.devices is not None or self.chip is not None):
            other = "--devices" if self.devices is not None else "--chip"
            raise UserError(f"--topology {self.topology} says the devices and their chip; leave {other} out")
        if self.topology is None and self.slices != 1:
            raise UserError(f"--slices {self.slices} is for a --topology; give one, such as v5e:4x4")
        if self.devices is not None and self.devices < 1:
            raise UserError(f"--devices is {self.devices}; it must be at least 1")


def plan_and_show(arguments: Sequence[str], prog: str) -> None:
    """Plan what a command line asks for, and print it."""
    own, rest = take_fields(PlanCommand, arguments)
    command = parse(PlanCommand, own, prog=prog, description=f"{PlanCommand.__doc__} {prog} CONFIG [FLAGS]")
    jax.config.update("jax_platforms", "cpu")  # accelerators of this machine are left to others
    simulate_devices(command.devices or NUM_DEVICES)
    config = parse_config(rest, prog)
    devices = _devices(command)
    chip = None if command.chip is None else chip_named(command.chip)
    console = Console(stderr=True, highlight=False)
    with console.status("compiling the train step") as status:
        plan = make_plan(config, devices, chip)
        plan = with_remedy(plan, config, devices, chip, tick=lambda flags: status.update(f"compiling with {flags}"))
    if command.json:
        print(json.dumps(dataclasses.asdict(plan)))
    else:
        print_plan(plan)


def _devices(command: PlanCommand) -> list[jax.Device]:
    if command.topology is not None:
        return tpu_devices(command.topology, num_slices=command.slices)
    count = command.devices or NUM_DEVICES
    found = jax.devices()
    if len(found) < count:
        raise UserError(
            f"--devices {count}, but JAX has been told to simulate {len(found)}; unset JAX_NUM_CPU_DEVICES or XLA_FLAGS"
        )
    return found[:count]
