"""What is saved of a run, as it lies on disk: steps, and parameters as NumPy arrays. No device is needed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from transformer_jax.atomic import as_path, is_remote
from transformer_jax.errors import UserError

MODEL = "model"
"""The item of a checkpoint that has the parameters, which are all that inference reads."""

COMMITTED = "commit_success.txt"
"""What Orbax writes last to a checkpoint in a bucket, where a folder cannot be renamed at once."""

ABOUT = "_CHECKPOINT_METADATA"
"""What Orbax writes down about a checkpoint."""

LEAF = "/value"
"""How the names of a module's parameters end in a checkpoint."""


class SavedArrays(Mapping[str, np.ndarray]):
    """The parameters of a checkpoint as NumPy arrays, each read when it is asked for.

    Neither the model nor a device is needed. The names are those of the model's own attributes, such as
    `encoder.blocks.feed_forward.input.weight`; a layer axis comes first in those of a stack.

    Args:
        path: folder of a run, or of its checkpoints.
        step: the newest by default.
    """

    def __init__(self, path: Path | str, step: int | None = None):
        path = as_path(path)
        directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        steps = saved_steps(directory)
        self.step = max(steps, default=None) if step is None else step
        if self.step not in steps:
            raise UserError(no_such_step(directory, step, steps))
        self._folder = directory / str(self.step) / MODEL
        # Names, and the shape and type of each array, which are little: the numbers stay on disk.
        self._arrays = {}
        with self._damage():
            for key in self._store("").list().result():
                saved_name, is_array, _ = key.decode().partition("/.zarray")
                if is_array:
                    self._arrays[saved_name.removesuffix(LEAF).replace("/", ".")] = self._open(saved_name)
            if not self._arrays:
                raise ValueError("it has no parameters")

    def __getitem__(self, name: str) -> np.ndarray:
        with self._damage():
            return self._arrays[name].read().result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def abstract(self, name: str) -> jax.ShapeDtypeStruct:
        """Shape and type of an array, which is not read."""
        array = self._arrays[name]
        return jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise UserError(f"{self._folder} is damaged: {str(error).splitlines()[0]}") from error

    def _store(self, name: str) -> Any:
        local = {"driver": "file", "path": f"{self._folder.absolute()}/"}
        base = f"{self._folder}/" if is_remote(self._folder) else local
        return tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "path": name}).result()

    def _open(self, name: str) -> Any:
        spec = {"driver": "zarr", "fill_missing_data_reads": False, "kvstore": self._store(f"{name}/").spec().to_json()}
        return tensorstore.open(spec, read=True).result()


def array_name(path: Any) -> str:
    """What a parameter is called in `SavedArrays`, of its path in the tree of the model."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(LEAF).replace("/", ".")


def load_arrays(path: Path | str, step: int | None = None) -> dict[str, np.ndarray]:
    """The parameters of a checkpoint in memory as NumPy arrays, by name; see `SavedArrays`.

    Args:
        path: folder of a run, or of its checkpoints.
        step: the newest by default.
    """
    return dict(SavedArrays(path, step))


def saved_steps(directory: Path) -> list[int]:
    """The steps that are whole on disk, oldest first; unlike a manager, it knows nothing of a save under way."""
    directory = as_path(directory)
    paths = [path for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    return sorted(int(path.name) for path in paths if not is_remote(path) or (path / COMMITTED).exists())


def saved_step(directory: Path) -> int | None:
    """The newest step that is whole on disk."""
    return max(saved_steps(directory), default=None)


def commit_time(folder: Path) -> float | None:
    """When the checkpoint of a step was complete, in seconds since 1970; None where that was not written down."""
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))["commit_timestamp_nsecs"] / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return None


def no_such_step(directory: Path, step: int | None, steps: Sequence[int]) -> str:
    """What to say of a step that is not there."""
    asked, kept = "" if step is None else f" of step {step}", ", ".join(map(str, steps)) or "none"
    return f"{directory} has no checkpoint{asked}; there are: {kept}"
