"""Devices to compile for that are not there, and what a compiled program takes on each of them."""

import math
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import CHIPS, Chip, find_chip

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""What libtpu asks the metadata server of Google Cloud for otherwise. It compiles for any topology, whatever type is
named here; a process that has set this cannot use the TPUs of its own host any more."""
LARGEST = {"v3": (32, 32, 1), "v5e": (16, 16, 1), "v6e": (16, 16, 1)}
"""The largest slices of chips that are connected in two dimensions. Beyond them the compiler may abort the process."""
EXAMPLES = "v5e:4x4, v6e:2x4, v5p:2x2x4, v4:2x2x1 or tpu7x:2x2x1"


def tpu_devices(topology: str, *, num_slices: int = 1) -> list[jax.Device]:
    """The devices of a TPU topology, to lower and compile programs for; nothing can run on them.

    Needs the package libtpu, and no TPU. Of TPU v3 and v7x, a chip is two devices.

    Args:
        topology: chip and shape, such as v5e:4x4 for 16 chips of TPU v5e.
        num_slices: number of such slices, which are connected by the network of the data center.
    """
    chip, shape = _parse(topology)
    if num_slices < 1:
        raise UserError(f"num_slices={num_slices} must be at least 1")
    if find_spec("libtpu") is None:
        raise UserError(
            f'to compile for {topology}, the TPU compiler must be installed: pip install "transformer_jax[tpu]"'
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {}
    if num_slices > 1:
        options["num_slices"] = num_slices
    if chip.topology == "v4":  # as Cloud TPUs are set up: its two cores are one device
        options["chip_config_name"] = "megacore"
    if math.prod(shape) < 4:  # a part of a host, which has 2x2 chips by default
        options["chips_per_host_bounds"] = (*shape, 1, 1)[:3]
    name = f"{chip.topology}:{'x'.join(map(str, shape))}"
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except Exception as error:  # of several kinds, by version
        raise _explain(topology, error) from error


def _parse(topology: str) -> tuple[Chip, tuple[int, ...]]:
    chip = find_chip(topology)
    match = re.fullmatch(r"[^:]+:(\d+(?:x\d+){1,2})", topology)
    if match is None or chip is None or chip.topology is None:
        known = ", ".join(chip.topology for chip in CHIPS if chip.topology)
        raise UserError(f"topology {topology!r} is not known; give a chip ({known}) and a shape, such as {EXAMPLES}")
    shape = tuple(int(side) for side in match[1].split("x"))
    largest = LARGEST.get(chip.topology, (math.inf,) * 3)
    if any(side > limit for side, limit in zip(shape, largest, strict=False)):
        raise UserError(
            f"topology {topology!r} does not exist: a slice of {chip.name} is at most {largest[0]}x{largest[1]}; "
            "give a smaller one and num_slices"
        )
    return chip, shape


def _explain(topology: str, error: Exception) -> UserError:
    if "lockfile" in str(error) or "already in use" in str(error):
        return UserError(
            "another process on this machine uses libtpu; wait until it has ended or, since compiling takes no TPU, "
            f"set the environment variable ALLOW_MULTIPLE_LIBTPU_LOAD=1 ({error})"
        )
    return UserError(f"topology {topology!r} does not exist; give one such as {EXAMPLES} ({error})")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a compiled program takes on each device."""

    arguments: int
    """Of what is passed to it: parameters, optimizer state, the batch."""
    outputs: int
    """Of what it returns."""
    temporaries: int
    """Of what it keeps in between. On a TPU this adds up more than is there at any one time."""
    aliased: int
    """Of arguments that are donated, so that outputs take their place."""
    live: int | None = None
    """Most bytes that are in use at the same time, where the compiler says so; on a TPU with those in the vector memory
    of the chip, which is at most some 100 MiB."""

    @property
    def peak(self) -> int:
        """The memory that must be there."""
        return self.arguments + self.outputs + self.temporaries - self.aliased if self.live is None else self.live


def memory(compiled: jax.stages.Compiled) -> MemoryUse:
    """What a compiled program takes on each device.

    On a TPU, the peak is XLA's own `peak_memory_in_bytes`: the compiler accepts programs whose arguments, outputs and
    temporaries add up to more than the chip has. Elsewhere that number leaves out the temporaries.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("the compiler of these devices does not say how much memory a program takes")
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    is_tpu = any(device.platform == "tpu" for sharding in shardings[:1] for device in sharding.device_set)
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        live=stats.peak_memory_in_bytes if is_tpu else None,
    )


@dataclass(frozen=True)
class Roofline:
    """An estimate of the least seconds that a step takes, by what may bound it; a real step takes longer."""

    compute: float
    """If it only multiplied matrices, at the peak rate."""
    memory: float
    """If it only read and wrote the memory of the chip."""
    interconnect: float
    """If it only sent to other chips, over all links at once."""

    @property
    def bound(self) -> str:
        """The name of the slowest: compute, memory or interconnect."""
        return max(vars(self), key=lambda name: vars(self)[name])

    @property
    def seconds(self) -> float:
        """The estimate, when all three overlap perfectly."""
        return max(vars(self).values())


def roofline(flops: float, bytes_moved: float, collective_bytes: float, chip: Chip) -> Roofline:
    """The least time of a step on one device (Williams et al. 2009), with matrix products in bfloat16: an estimate.

    Args:
        flops: of one device.
        bytes_moved: that it reads from and writes to its memory.
        collective_bytes: that it sends to other devices.
        chip: what the device is, or is a part of.
    """
    return Roofline(
        compute=flops * chip.devices / chip.bfloat16_flops,
        memory=bytes_moved * chip.devices / chip.memory_bandwidth,
        interconnect=collective_bytes * chip.devices / chip.interconnect,
    )
