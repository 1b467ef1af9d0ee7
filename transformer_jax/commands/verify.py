"""`transformer-jax verify CONFIG [--flags]`: whether a config gives the same numbers on every mesh, resumed or not."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from transformer_jax.commands.parsing import parse, take_fields
from transformer_jax.commands.train import parse_config
from transformer_jax.errors import UserError
from transformer_jax.parallel.host import simulate_devices
from transformer_jax.training.verify import Check, verify

NUM_DEVICES = 8  # that are simulated where there is only a CPU


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compute the first steps of a config in every way, and print how the losses and the gradients differ.

    `verify CONFIG [FLAGS]`, where CONFIG and FLAGS are those of train, and these. Besides meshes it compares
    micro-batches, packed rows with rows of their own, and a state that was saved and restored. On a CPU it simulates
    eight devices. Each comparison compiles the step, which takes some seconds for a small model.
    """

    meshes: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Mesh to verify, such as "fsdp=4,tensor=2", again for each; by default all kinds of 2, 4 and 8 devices."""
    verify_steps: int = 2
    """Number of updates to compare."""
    tolerance: float = 1e-4
    """Largest relative difference that is taken for rounding."""
    json: bool = False
    """Print JSON, one object for each check, and no table."""


def verify_and_show(arguments: Sequence[str], prog: str) -> None:
    """Verify what a command line asks for, and print a table; raises where a check has failed."""
    own, rest = take_fields(Verify, arguments)
    command = parse(Verify, own, prog=prog)
    simulate_devices(NUM_DEVICES)
    config = parse_config(rest, prog)
    console = Console(stderr=True, highlight=False)
    meshes = [_sizes(mesh) for mesh in command.meshes] or None
    with console.status("starting") as status:

        def tick(name: str) -> None:
            status.update(name)
            if not console.is_terminal:
                console.print(f"computing: {name}")

        checks = verify(config, meshes, steps=command.verify_steps, tolerance=command.tolerance, tick=tick)
    for line in [dataclasses.asdict(check) | {"passed": check.passed} for check in checks] if command.json else ():
        print(json.dumps(line))
    if not command.json:
        _print(checks)
    if failed := [check.name for check in checks if not check.passed]:
        raise UserError(f"not the same numbers: {'; '.join(failed)}")


def _sizes(text: str) -> dict[str, int]:
    """The axes of a mesh and their sizes."""
    try:
        return {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise UserError(f"--meshes {text!r} is not a mesh; write axes and sizes, such as fsdp=4,tensor=2") from None


def _print(checks: list[Check]) -> None:
    table = Table("", "loss", "gradient", title="differences from jit on one device")
    table.add_column("largest in", overflow="fold")
    table.add_column("", overflow="fold")
    for check in checks:
        if check.skipped:
            table.add_row(check.name, "", "", "", f"skipped: {check.skipped}")
            continue
        numbers = [f"{value:.1e}" if value else "0" for value in (check.loss, check.gradient)]
        table.add_row(check.name, *numbers, check.weight, "same" if check.passed else "DIFFERENT")
    Console(highlight=False).print(table, markup=False)
