"""Checkpoints of the training state: written in the background, whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from transformer_jax.errors import UserError
from transformer_jax.training.state import TrainState

BEST = "loss"
"""The validation metric whose lowest value marks the best checkpoint."""


class Checkpoints:
    """The newest `keep` states of a run, and the one with the lowest validation loss."""

    def __init__(self, directory: Path, keep: int = 3, *, read_only: bool = False):
        self._directory = directory
        best = policies.BestN(get_metric_fn=lambda figures: -figures[BEST], n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
                save_interval_steps=0 if read_only else 1,
            ),
        )

    def latest(self) -> int | None:
        """The newest step that was saved whole."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Every step that is kept, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, figures: Mapping[str, float | str] | None = None) -> None:
        """Begin to write the state; `figures` are those of its evaluation on the validation split."""
        step = int(state.step)
        if step not in self._manager.all_steps():
            metrics = None if figures is None else dict(figures)
            self._manager.save(step, args=ocp.args.StandardSave(_to_arrays(state)), metrics=metrics)

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The state of a step, by default the newest; `like` has its structure, and may be abstract."""
        step = self.latest() if step is None else step
        if step not in self._manager.all_steps():
            kept = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self._directory} has no checkpoint of step {step}; there are: {kept}")
        device = SingleDeviceSharding(jax.local_devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
            for name, x in jax.eval_shape(_to_arrays, like).items()
        }
        try:
            arrays = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except ValueError as error:
            raise UserError(f"checkpoint {step} of {self._directory} is of another model: {error}") from error
        return _from_arrays(like, arrays)

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being written, then give up the folder."""
        self._manager.close()


def saved_step(directory: Path) -> int:
    """The newest step that is whole on disk, 0 without one; unlike a manager, it knows nothing of a save under way."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _to_arrays(state: TrainState) -> dict[str, jax.Array]:
    """The state as flat names and plain arrays, so that a checkpoint outlives the classes that made it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _from_arrays(like: TrainState, arrays: dict[str, jax.Array]) -> TrainState:
    def pick(path, leaf):
        array = arrays[jax.tree_util.keystr(path, simple=True, separator="/")]
        return jax.random.wrap_key_data(array) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(pick, like)


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
