"""The law of parallelism, on a config of one's own: the same numbers however a step is divided, packed or resumed."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data import Batches, Store
from transformer_jax.errors import UserError
from transformer_jax.layers import named_parameters
from transformer_jax.parallel import MeshConfig, Strategy
from transformer_jax.tasks.task import loss_terms, mean_loss
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.config import Config
from transformer_jax.training.run import Run
from transformer_jax.training.trial import Outcome, Trial

NUM_PACKED = 64  # that are packed, and then given rows of their own
NOISE = 1e-3
"""Gradients are compared relative to the largest of their weight, or to this share of the largest of all: those of a
key's bias, for one, are zero but for rounding."""


@dataclass(frozen=True)
class Check:
    """How a way to compute the same differs from the first one, which is `jit` on one device."""

    name: str
    """What was done, such as "jit, data=4 tensor=2"."""
    loss: float = 0.0
    """The largest relative difference of the loss of a step."""
    gradient: float = 0.0
    """The largest difference of the gradient of the first step, relative to the largest gradient of the same weight."""
    weight: str = ""
    """The weight with that difference."""
    tolerance: float = 0.0
    """The most that is taken for rounding: sums are added up in another order."""
    skipped: str = ""
    """Why this cannot be done here; "" if it was done."""

    @property
    def passed(self) -> bool:
        """Whether the differences are within the tolerance, or there was nothing to do."""
        return bool(self.skipped) or (self.loss <= self.tolerance and self.gradient <= self.tolerance)


def verify(
    config: Config,
    meshes: Iterable[MeshConfig | Mapping[str, int]] | None = None,
    *,
    steps: int = 2,
    tolerance: float = 1e-4,
    tick: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Compute the first steps of a config in every way, and say how the losses and the gradients differ.

    They are computed in float32 with dropout, from a few hundred of the training records: with `jit` on one device,
    with `pmap` and on meshes, in micro-batches, packed and not, and from a checkpoint. Of the last, the state must be
    equal bit for bit.

    Args:
        config: what would be trained.
        meshes: `MeshConfig(fsdp=4)` or `{"fsdp": 4}`, each on as many devices as it needs; by default all kinds of
            meshes of 2, 4 and 8 devices that there are.
        steps: number of updates to compare.
        tolerance: largest relative difference that is taken for rounding.
        tick: called with the name of each check before it is made.
    """
    if steps < 1:
        raise UserError(f"steps must be at least 1; got {steps}")
    asked = _default_meshes(config) if meshes is None else [_as_mesh(mesh) for mesh in meshes]
    with tempfile.TemporaryDirectory(prefix="transformer_jax_verify_") as folder:
        trial = Trial.of(config, Path(folder), steps, _rows_multiple(asked))
        tick("jit on one device")
        expected = trial.outcome(_one_device())
        checks = []
        for name, function in _ways(trial, asked, meshes is not None):
            tick(name)
            try:
                checks.append(_compare(name, function(), expected, tolerance))
            except UserError as error:
                if meshes is not None:
                    raise  # it was asked for
                checks.append(Check(name, skipped=str(error)))
        for name, check in (("packed or not", _packing), ("resumed from a checkpoint", _resuming)):
            tick(name)
            checks.append(replace(check(trial, tolerance), name=name))
    return checks


def _ways(trial: Trial, meshes: Sequence[MeshConfig], all_asked: bool) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for mesh in meshes:
        sizes = " ".join(f"{name}={size}" for name, size in _sizes(mesh).items() if size > 1) or "one device"
        yield f"jit, {sizes}", lambda mesh=mesh: trial.outcome(_on_mesh(trial, mesh))  # type: ignore[misc]
    for count in () if all_asked else _device_counts():
        yield f"pmap, data={count}", lambda count=count: trial.outcome(Strategy.pmap(jax.devices()[:count]))  # type: ignore[misc]
    yield "4 micro-batches on one device", lambda: trial.outcome(_one_device(), 4)
    if (count := max(_device_counts(), default=1)) > 1:
        data = MeshConfig(data=count)
        yield f"2 micro-batches, data={count}", lambda: trial.outcome(_on_mesh(trial, data), 2)


def _compare(name: str, found: Outcome, expected: Outcome, tolerance: float) -> Check:
    pairs = zip(found.losses, expected.losses, strict=True)
    loss = float(np.max([abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]))  # NaN if one is, unlike max
    gradient, weight = _largest_difference(found.gradients, expected.gradients)
    return Check(name, loss, gradient, weight, tolerance)


def _largest_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> tuple[float, str]:
    largest = max((float(np.abs(value).max(initial=0)) for value in expected.values()), default=0.0)
    differences = {
        name: float(np.abs(found[name] - value).max(initial=0))
        / max(float(np.abs(value).max(initial=0)), NOISE * largest, 1e-30)
        for name, value in expected.items()
    }
    worst = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf), default="")
    return differences.get(worst, 0.0), worst


def _packing(trial: Trial, tolerance: float) -> Check:
    """Whether examples that share a row have the loss and the gradients that they have in rows of their own."""
    run = trial.run
    if run.config.batching.pack_length is None:
        return Check("", skipped="batching.pack_length is None: every example has a row of its own")
    alone = replace(run.config.batching, pack_length=None)
    examples = Store.of([trial.examples.item(i) for i in range(min(NUM_PACKED, len(trial.examples)))], run.task.columns)
    found = []
    for batching in (run.config.batching, alone):
        task = run.config.task.build(run.processor, run.config.model, batching)
        layout = task.layout(examples, training=True)
        found.append(_sums(run, task, [batch for _, batch in Batches(layout).once()]))
    (packed, packed_weight), (apart, apart_weight) = found
    if packed_weight != apart_weight:
        return Check("", skipped="the rows are not of the same examples: the task cuts or masks them by row")
    return _compare("", packed, apart, tolerance)


def _sums(run: Run, task: Any, batches: list[Any]) -> tuple[Outcome, float]:
    """The mean loss over all batches without dropout, its gradients, and the weight."""
    model = run.strategy.initialize(run._initial_model)

    @jax.jit
    def weights_of(model: Any, batch: Any) -> Any:
        return {name: jnp.float32(term.weight) for name, term in loss_terms(task.loss(model, batch, None)).items()}

    weights = jax.tree.map(lambda *parts: sum(parts), *(weights_of(model, batch) for batch in batches))

    @jax.jit
    def gradient(model: Any, batch: Any) -> Any:
        def objective(model: Any) -> Any:
            terms = loss_terms(task.loss(model, batch, None))
            return mean_loss({name: term._replace(weight=weights[name]) for name, term in terms.items()})["loss"]

        return jax.value_and_grad(objective)(model)

    loss, gradients = jax.tree.map(lambda *parts: sum(parts), *(gradient(model, batch) for batch in batches))
    named = {name: np.asarray(leaf[...]) for name, leaf in named_parameters(gradients).items()}
    return Outcome([float(loss)], named), float(sum(weights.values()))


def _resuming(trial: Trial, tolerance: float) -> Check:
    """Whether a state that was saved and restored goes on to the same state, bit for bit."""
    count = max(_device_counts(), default=1)
    strategy = _on_mesh(trial, MeshConfig(data=count))
    run = replace(trial.run, strategy=strategy)
    steps = replace(trial, steps=2 * trial.steps, batches=trial.batches * 2)
    directory = trial.run.workdir.path / "checkpoints"
    directory.mkdir(parents=True)
    checkpoints = Checkpoints(directory)
    whole = run.first_state()[0]
    for number, (state, _) in enumerate(steps.steps_from(run, whole)):
        if number == trial.steps:
            checkpoints.save(state)
            checkpoints.wait()
        whole = state
    half = run.restored_state(checkpoints)
    checkpoints.close()
    for state, _ in steps.steps_from(run, half, first=trial.steps):
        half = state
    pairs = zip(
        *(jax.tree_util.tree_leaves_with_path((s.step, s.model, s.optimizer)) for s in (half, whole)), strict=True
    )
    for (path, a), (_, b) in pairs:
        if not np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            difference = float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))))
            return Check("", gradient=difference or float("inf"), weight=name)
    return Check("")


def _one_device() -> Strategy:
    return Strategy.choose(devices=jax.devices()[:1])


def _on_mesh(trial: Trial, mesh: MeshConfig) -> Strategy:
    strategy = Strategy.choose("jit", mesh, trial.run.config.rules)
    strategy.shardings(trial.run.abstract_model())  # raises where the model does not fit
    return strategy


def _as_mesh(mesh: MeshConfig | Mapping[str, int]) -> MeshConfig:
    """With all sizes, so that as many devices are used as it has."""
    if not isinstance(mesh, MeshConfig):
        known = {field.name for field in fields(MeshConfig)}
        for name in mesh:
            if name not in known:
                raise UserError(f"a mesh has no axis {name!r}; its axes are {', '.join(sorted(known - {'slices'}))}")
        mesh = MeshConfig(**mesh)
    return mesh if mesh.data is not None else replace(mesh, data=1)


def _sizes(mesh: MeshConfig) -> dict[str, int]:
    return {field.name: getattr(mesh, field.name) or 1 for field in fields(mesh) if field.name != "slices"}


def _device_counts() -> list[int]:
    return [count for count in (2, 4, 8) if count <= len(jax.devices()) and jax.process_count() == 1]


def _default_meshes(config: Config) -> list[MeshConfig]:
    counts = _device_counts()
    axes = ["data", "fsdp", "tensor", "sequence"]
    axes += ["expert"] if getattr(config.model, "experts", None) is not None else []
    meshes = [MeshConfig(**{"data": 1, axis: count}) for axis, count in product(axes, counts)]
    if 4 in counts:
        meshes += [MeshConfig(data=2, fsdp=2), MeshConfig(data=2, tensor=2)]
    if 8 in counts:
        meshes += [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=2, sequence=2, tensor=2)]
    return meshes


def _rows_multiple(meshes: Sequence[MeshConfig]) -> int:
    """Rows of a batch that divide in every way that is compared, so that all have the same ones."""
    shards = [sizes["data"] * sizes["fsdp"] * sizes["expert"] for sizes in map(_sizes, meshes)]
    return lcm(4, *shards, *(2 * count for count in _device_counts()))
