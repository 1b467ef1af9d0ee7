"""Where a train step does not fit into the memory of its devices: the nearest setting that does."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax

from transformer_jax.errors import UserError
from transformer_jax.layers import Rematerialize
from transformer_jax.parallel.chips import Chip
from transformer_jax.training.config import Config
from transformer_jax.training.plan import Attempt, Plan, make_plan

MAX_COMPILES = 6
MARGIN = 1.1
"""How far an estimate may be beyond the memory for the setting to be compiled all the same."""


@dataclass(frozen=True)
class Remedy:
    """A change of a config that saves memory."""

    flags: tuple[str, ...]
    config: Config
    estimate: float | None
    """Bytes that the step would need on a device, None if nobody knows before it is compiled."""


def with_remedy(
    plan: Plan,
    config: Config,
    devices: Sequence[jax.Device],
    chip: Chip | None = None,
    *,
    tick: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan and, where its step does not fit, what was compiled instead and what to do.

    Micro-batches are tried first, then recomputation, then more shards of the weights, then all of them together. What
    cannot fit by its weights and their gradients alone, or is far too large by an estimate, is not compiled.

    Args:
        plan: of the config.
        config: what would be trained.
        devices: that it was compiled for.
        chip: what simulated devices stand for.
        tick: called with the flags of each setting before it is compiled.
    """
    if plan.fits is not False:
        return plan
    attempts: list[Attempt] = []
    candidates = [*remedies(plan, config)]
    if len(candidates) > MAX_COMPILES:  # the last one saves most
        candidates = [*candidates[: MAX_COMPILES - 1], candidates[-1]]
    for remedy in candidates:
        tick(" ".join(remedy.flags))
        try:
            found = make_plan(remedy.config, devices, chip)
        except UserError:  # a dimension that does not divide
            continue
        attempts.append(Attempt(remedy.flags, found.peak_bytes, bool(found.fits)))
        if found.fits:
            return replace(plan, attempts=tuple(attempts), advice=f"it fits with {' '.join(remedy.flags)}")
    return replace(plan, attempts=tuple(attempts), advice=_no_remedy(plan))


def remedies(plan: Plan, config: Config) -> Iterator[Remedy]:
    """Changes that may make the step fit, the smallest first."""
    for remedy in _all(plan, config):
        least = _least(plan, remedy.config.mesh.fsdp // config.mesh.fsdp)
        if max(least, (remedy.estimate or 0) / MARGIN) <= (plan.available_bytes or math.inf):
            yield remedy


def _all(plan: Plan, config: Config) -> Iterator[Remedy]:
    accumulated = [*_accumulated(plan, config)]
    rematerialized = [*_rematerialized(config)]
    sharded = [*_sharded(plan, config)]
    yield from accumulated
    yield from rematerialized
    yield from sharded
    for most, others in ((rematerialized, accumulated[-1:]), (sharded, accumulated), (sharded, rematerialized[-1:])):
        for other in others if most else ():
            yield _together(plan, config, [most[-1], other])
    if sharded and rematerialized and accumulated:
        yield _together(plan, config, [sharded[-1], rematerialized[-1], accumulated[-1]])


def _accumulated(plan: Plan, config: Config) -> Iterator[Remedy]:
    """Twice, four times ... as many micro-batches, as long as each device has a row of each."""
    rows = max(shape[0] for shape in plan.batch.values())
    shards = math.prod(plan.mesh[axis] for axis in config.rules.batch if axis in plan.mesh)
    count = 2
    while config.accumulate * count <= rows // shards:
        more = replace(config, accumulate=config.accumulate * count)
        yield Remedy(("--accumulate", str(more.accumulate)), more, _estimate(plan, config, more))
        count *= 2


def _rematerialized(config: Config) -> Iterator[Remedy]:
    """The policies that keep less than the config's own."""
    model: Any = config.model
    policies = ("none", "dots", "dots_without_batch", "full")
    assert set(policies) == set(get_args(Rematerialize))
    if not hasattr(model, "rematerialize"):
        return
    for policy in policies[policies.index(model.rematerialize) + 1 :]:
        flags = ("--model.rematerialize", policy)
        yield Remedy(flags, replace(config, model=replace(model, rematerialize=policy)), None)


def _sharded(plan: Plan, config: Config) -> Iterator[Remedy]:
    """The data axis of the mesh made into shards of the weights, half of it and then more."""
    data, count = plan.mesh["data"], 2
    while data % count == 0:
        mesh = replace(config.mesh, fsdp=config.mesh.fsdp * count, data=config.mesh.data and data // count)
        flags = ["--mesh.fsdp", str(mesh.fsdp)]
        if mesh.data is not None:
            flags += ["--mesh.data", str(mesh.data)]
        more = replace(config, mesh=mesh)
        yield Remedy(tuple(flags), more, _estimate(plan, config, more))
        count *= 2


def _together(plan: Plan, config: Config, parts: Sequence[Remedy]) -> Remedy:
    changes: dict[str, Any] = {}
    for part in parts:
        for name in ("accumulate", "model", "mesh"):
            if getattr(part.config, name) != getattr(config, name):
                changes[name] = getattr(part.config, name)
    changed = replace(config, **changes)
    estimate = None if changed.model != config.model else _estimate(plan, config, changed)
    return Remedy(tuple(flag for part in parts for flag in part.flags), changed, estimate)


def _estimate(plan: Plan, config: Config, changed: Config) -> float | None:
    """What a step needs with other micro-batches, which share the activations, and another mesh."""
    if plan.peak_bytes is None:
        return None
    activations = max(plan.peak_bytes - _least(plan, 1), 0) * config.accumulate / changed.accumulate
    return _least(plan, changed.mesh.fsdp // config.mesh.fsdp) + activations


def _least(plan: Plan, more_shards: int) -> float:
    """Bytes of the weights, the optimizer's state and the gradients, over so many times as many shards."""
    return (2 * plan.parameter_bytes + plan.optimizer_bytes) / max(more_shards, 1)


def _no_remedy(plan: Plan) -> str:
    total = _least(plan, 1) * plan.mesh["fsdp"]
    available = plan.available_bytes or math.inf
    if total / (plan.mesh["fsdp"] * plan.mesh["data"]) <= available:
        return "nothing that was tried fits; use more devices, a smaller batch or a smaller model"
    shards = math.ceil(total / available)
    return (
        f"weights, optimizer state and gradients alone take {total / 2**30:.1f} GiB, which --mesh.fsdp divides: use "
        f"more than {shards} devices, or --optimizer.kind adafactor"
    )
