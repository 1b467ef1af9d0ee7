"""Checkpoints of the training state: written in the background, whole or not at all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from transformer_jax.atomic import as_path, is_remote
from transformer_jax.errors import UserError
from transformer_jax.parallel.host import quiet_loggers
from transformer_jax.tasks.task import BestCheckpoint
from transformer_jax.training.saved import MODEL, no_such_step
from transformer_jax.training.state import TrainState

REST = "training"
"""The item of a checkpoint that only training needs, besides the parameters."""

LOWEST_LOSS = BestCheckpoint("loss", "lowest")


class Checkpoints:
    """The newest `keep` states of a run, and the one with the best validation metric.

    Args:
        directory: has a folder for each step.
        keep: number of the newest steps to keep.
        best: which metric marks the best step.
        evaluated: the validation metrics of earlier steps. They are in the log of a run and not in its checkpoints,
            since a state may be saved before its evaluation is through.
        read_only: whether nothing is to be written.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        *,
        best: BestCheckpoint = LOWEST_LOSS,
        evaluated: Mapping[int, Mapping[str, Any]] | None = None,
        read_only: bool = False,
    ):
        self._directory = directory = as_path(directory)
        quiet_loggers()
        self._best = _Best(best, dict(evaluated or {}))
        self._policy = policies.AnyPreservationPolicy([policies.LatestN(keep), self._best])
        if not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        processes = _processes()
        self._manager = ocp.CheckpointManager(
            directory if is_remote(directory) else directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._policy,
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=False,
                save_interval_steps=0 if read_only else 1,
                multiprocessing_options=processes,
            ),
            handler_registry=_handlers(processes),
        )

    def latest(self) -> int | None:
        """The newest step that was saved whole."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Every step that is kept, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, metrics: Mapping[str, float | str] | None = None) -> None:
        """Begin to write the state, unless it is there; `metrics` are those of its evaluation on the valid split."""
        if metrics is not None:
            self._best.evaluated[int(state.step)] = metrics
        model, rest = _split(state)
        self._save(int(state.step), {MODEL: ocp.args.PyTreeSave(model), REST: ocp.args.PyTreeSave(rest)})

    def save_model(self, model: Any, step: int = 0) -> None:
        """Begin to write parameters without a training state, for inference and to start runs from."""
        self._save(step, {MODEL: ocp.args.PyTreeSave(_flat(model))})

    def _save(self, step: int, items: dict[str, Any]) -> None:
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, like: TrainState, step: int | None = None, *, shardings: Any = None) -> TrainState:
        """The state of a step, whatever devices it was saved on.

        Args:
            like: a state of the same structure, which may be abstract.
            step: the newest by default.
            shardings: of each array, in the same structure; all on the first device by default.
        """
        step = self._known(step)
        if not (self._directory / str(step) / REST).is_dir():
            raise UserError(
                f"{self._directory.parent} has parameters and no training state, as converted runs do; start a new run "
                f"from it with --init-from {self._directory.parent}"
            )
        model, rest = _split(like, abstract=True)
        where = (None, None) if shardings is None else _split(shardings)
        items = {MODEL: _target(model, where[0]), REST: _target(rest, where[1])}
        return _merge(like, self._restore(step, items))

    def restore_model(self, like: Any, step: int | None = None, *, dtype: Any = None, shardings: Any = None) -> Any:
        """The parameters of a step, and nothing else of it.

        Args:
            like: a model of the same structure, which may be abstract.
            step: the newest by default.
            dtype: of the parameters; that of `like` by default.
            shardings: of each parameter, in the same structure; all on the first device by default.
        """
        where = None if shardings is None else _flat(shardings)
        target = _target(jax.eval_shape(_flat, like), where, dtype)
        return _unflat(like, self._restore(self._known(step), {MODEL: target})[MODEL])

    def _known(self, step: int | None) -> int:
        self.wait()  # a step is listed before it is whole
        step = self.latest() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise UserError(no_such_step(self._directory, step, self.steps()))
        return step

    def _restore(self, step: int, items: Mapping[str, Any]) -> Any:
        arguments = {name: ocp.args.StandardRestore(target) for name, target in items.items()}
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**arguments))
        except (ValueError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"checkpoint {step} of {self._directory} is of another model, or damaged: {reason}"
            ) from error

    def surplus(self) -> list[int]:
        """The steps that are neither among the newest `keep` nor the best, oldest first."""
        steps = self.steps()
        infos = [SimpleNamespace(step=step) for step in steps]
        kept = self._policy.should_preserve(infos, context=None)
        return [step for step, is_kept in zip(steps, kept, strict=True) if not is_kept]

    def delete(self, step: int) -> None:
        """Remove a step."""
        self._manager.delete(self._known(step))

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being written, then release the folder."""
        self._manager.close()


@dataclass(frozen=True)
class _Best(policies.PreservationPolicy):
    """Keeps the step with the best metric; of several, the newest."""

    best: BestCheckpoint
    evaluated: dict[int, Mapping[str, Any]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        values = {info.step: self._value(info.step) for info in checkpoints}
        chosen = max(values, key=lambda step: (values[step], step), default=None)
        return [info.step == chosen and values[info.step] > -math.inf for info in checkpoints]

    def _value(self, step: int) -> float:
        found = self.evaluated.get(step, {}).get(self.best.metric, math.nan)
        value = -found if self.best.direction == "lowest" else found
        return value if math.isfinite(value) else -math.inf  # NaN has no order: it would win or lose by chance


def _processes() -> ocp.options.MultiprocessingOptions:
    """Which processes save together.

    Where they are named, they wait for each other by the coordination service. Otherwise they do by collectives on the
    devices, which must not come between those of a step.
    """
    several = set(range(jax.process_count())) if jax.process_count() > 1 else None
    return ocp.options.MultiprocessingOptions(active_processes=several)


def _handlers(processes: ocp.options.MultiprocessingOptions) -> Any:
    """How items are written: without compression, which saves a twelfth and takes as much memory as the state."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in (MODEL, REST):
        plain = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)
        registry.add(item, ocp.args.PyTreeSave, plain)
        standard = ocp.StandardCheckpointHandler(multiprocessing_options=processes)
        registry.add(item, ocp.args.StandardRestore, standard)
    return registry


def _split(state: TrainState, *, abstract: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters, and the rest of a state, as flat names and plain arrays."""
    rest = {"step": state.step, "optimizer": state.optimizer, "key": state.key}
    if abstract:
        return jax.eval_shape(_flat, state.model), jax.eval_shape(_flat, rest)
    return _flat(state.model), _flat(rest)


def _merge(like: TrainState, items: Any) -> TrainState:
    rest = _unflat({"step": like.step, "optimizer": like.optimizer, "key": like.key}, items[REST])
    return TrainState(rest["step"], _unflat(like.model, items[MODEL]), rest["optimizer"], rest["key"])


def _target(
    arrays: Mapping[str, Any], shardings: Mapping[str, Sharding] | None, dtype: Any = None
) -> dict[str, jax.ShapeDtypeStruct]:
    shardings = dict.fromkeys(arrays, SingleDeviceSharding(jax.local_devices()[0])) if shardings is None else shardings
    return {
        name: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=shardings[name]) for name, x in arrays.items()
    }


def _flat(tree: Any) -> dict[str, Any]:
    """A tree as flat names and plain arrays (or shardings), so that a checkpoint outlives the classes that made it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _unflat(like: Any, arrays: Mapping[str, jax.Array]) -> Any:
    def pick(path, leaf):
        array = arrays[jax.tree_util.keystr(path, simple=True, separator="/")]
        return jax.random.wrap_key_data(array) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(pick, like)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    """Whether an array is of keys; a sharding is not."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
