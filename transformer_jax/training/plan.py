"""What a train step takes on devices that need not be there: compiled ahead of time, from shapes alone."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from transformer_jax.layers import named_parameters
from transformer_jax.parallel.chips import Chip, find_chip
from transformer_jax.parallel.collectives import Traffic, collectives, summarize
from transformer_jax.parallel.hbm import memory_traffic
from transformer_jax.parallel.topology import MemoryUse, Roofline, memory, roofline
from transformer_jax.training.abstract_step import AbstractStep
from transformer_jax.training.config import Config

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class ParameterGroup:
    """Weights of one part of a model that have the same shape and lie on the devices alike."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """The logical name of each axis."""
    spec: str
    """The mesh axes that each axis is sharded over."""
    parameters: int
    """Of all of them."""
    bytes_per_device: int


@dataclass(frozen=True)
class Estimate:
    """How long a step takes at least, by the published figures of a chip. Nothing was measured: a step takes longer."""

    chip: str
    compute_seconds: float
    """Of all matrix products, those that are computed again included, at the peak of bfloat16."""
    memory_seconds: float | None
    """Of all that is read from and written to the memory; None where the program is not one of the chip."""
    interconnect_seconds: float
    """Of the collectives within a slice."""
    seconds: float
    """The longest of the three: they overlap perfectly."""
    bound: str
    """Which of them that is: compute, memory or interconnect."""
    model_flops_utilization: float
    """Model FLOPs a second at that speed, of the peak of the chips: more is not reached."""


@dataclass(frozen=True)
class Attempt:
    """A setting that was compiled since the one asked for does not fit."""

    flags: tuple[str, ...]
    peak_bytes: int | None
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What one train step of a config takes. Bytes are those of one device."""

    device_kind: str
    num_devices: int
    mesh: Mapping[str, int]
    """The axes of the mesh and their sizes."""
    batch: Mapping[str, tuple[int, ...]]
    """The arrays of the largest global batch."""
    assumptions: tuple[str, ...]
    num_parameters: int
    parameters: tuple[ParameterGroup, ...]
    """Largest first."""
    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    memory: MemoryUse | None
    """What the compiler says; None where it refused."""
    peak_bytes: int | None
    """What the program needs; None where the compiler refused without saying that."""
    available_bytes: int | None
    """Memory of a device; None where no chip is known."""
    fits: bool | None
    """Whether it fits: on a TPU, whether the compiler accepts the step. None where no chip is known."""
    model_flops: int
    """Of one step on all devices: 3 x the matrix products of the forward pass, recomputation not counted."""
    executed_flops: int
    """Of all matrix products of the step on all devices, recomputation included."""
    collectives: Mapping[str, Traffic]
    """By kind, of one device; `send` is what goes between slices."""
    memory_traffic: int | None
    """Bytes that a device reads from and writes to its memory, estimated; None for simulated devices."""
    estimate: Estimate | None
    compile_seconds: float
    attempts: tuple[Attempt, ...] = field(default=())
    """What was tried where the step does not fit; the last one fits if any does."""
    advice: str = ""
    """What to do where the step does not fit."""


def make_plan(config: Config, devices: Sequence[jax.Device], chip: Chip | None = None) -> Plan:
    """Compile the train step of a config for devices, and say what it takes.

    Args:
        config: what would be trained. Its data are not read where texts can stand in for them.
        devices: of a TPU topology (`parallel.topology.tpu_devices`), or simulated ones.
        chip: what simulated devices stand for.
    """
    is_tpu = devices[0].platform == "tpu"
    chip = find_chip(devices[0].device_kind) if is_tpu else chip
    step = AbstractStep.of(config, devices, "float32" if chip is None else "bfloat16")
    start = time.perf_counter()
    try:
        compiled = step.compile()
        use, needed, text = memory(compiled), None, compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        use, needed, text = None, needed_bytes(str(error)), ""
    seconds = time.perf_counter() - start
    peak = needed if use is None else use.peak
    available = None if chip is None else chip.memory // chip.devices
    fits = use is not None if is_tpu else None if available is None else use is not None and use.peak <= available
    traffic = summarize(collectives(text))
    moved = memory_traffic(text) if is_tpu and use is not None else None
    count = step.run.strategy.mesh.size
    model_flops, executed = step.flops()
    estimate = None
    if chip is not None and use is not None:
        within = sum(one.bytes_moved for kind, one in traffic.items() if kind != "send")
        bounds = roofline(executed / count, moved or 0, within, chip)
        estimate = _estimate(bounds, model_flops / count, chip, is_tpu)
    groups = parameter_groups(step.state.model)
    return Plan(
        device_kind=devices[0].device_kind,
        num_devices=count,
        mesh=dict(step.run.strategy.mesh.shape),
        batch={name: array.shape for name, array in step.batch.items()},
        assumptions=step.assumptions,
        num_parameters=sum(group.parameters for group in groups),
        parameters=groups,
        parameter_bytes=bytes_per_device(step.state.model),
        optimizer_bytes=bytes_per_device(step.state.optimizer),
        batch_bytes=bytes_per_device(step.batch),
        memory=use,
        peak_bytes=peak,
        available_bytes=available,
        fits=fits,
        model_flops=model_flops,
        executed_flops=executed,
        collectives=traffic,
        memory_traffic=moved,
        estimate=estimate,
        compile_seconds=seconds,
    )


def parameter_groups(model: Any) -> tuple[ParameterGroup, ...]:
    """The weights of an abstract model, grouped by module, shape and sharding; largest first."""
    found: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, weight in named_parameters(model).items():
        sharding = weight.get_value().sharding
        key = (name.split(".")[0], weight.shape, weight.axes, _shown(sharding), weight.dtype)
        found.setdefault(key, []).append((name, weight))
    groups = [
        ParameterGroup(
            names=tuple(name for name, _ in members),
            shape=shape,
            axes=axes,
            spec=spec,
            parameters=sum(weight.size for _, weight in members),
            bytes_per_device=bytes_per_device([weight for _, weight in members]),
        )
        for (_, shape, axes, spec, _), members in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.bytes_per_device))


def bytes_per_device(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def needed_bytes(message: str) -> int | None:
    """The memory that a program needs, as the TPU compiler's refusal has it."""
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _estimate(bounds: Roofline, model_flops: float, chip: Chip, is_exact: bool) -> Estimate:
    return Estimate(
        chip=chip.name,
        compute_seconds=bounds.compute,
        memory_seconds=bounds.memory if is_exact else None,
        interconnect_seconds=bounds.interconnect,
        seconds=bounds.seconds,
        bound=bounds.bound,
        model_flops_utilization=model_flops * chip.devices / chip.bfloat16_flops / max(bounds.seconds, 1e-30),
    )


def _shown(sharding: NamedSharding) -> str:
    """A partition for people: the mesh axes of each axis, "-" for one that is not sharded."""
    parts = [axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    used = [[axis for axis in axes if axis is not None and sharding.mesh.shape[axis] > 1] for axes in parts]
    return ", ".join("+".join(axes) or "-" for axes in used) if any(used) else "replicated"
