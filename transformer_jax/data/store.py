"""Encoded examples as a few long arrays, in memory or on disk."""

import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.atomic import atomic
from transformer_jax.data.columns import Column, Example, from_json, to_json
from transformer_jax.data.source import Lazy
from transformer_jax.errors import UserError


class Store(Lazy[Mapping[str, np.ndarray]]):
    """Examples by number, each a dict of arrays, as their columns say.

    A column is one array of the items of all examples, `values[name]`, which on disk is mapped and never read whole.
    Where it is ragged, `ends[name]` says where each example ends.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        values: Mapping[str, np.ndarray],
        ends: Mapping[str, np.ndarray],
        length: int,
        path: Path | None = None,
    ):
        self.columns, self.values, self.ends = dict(columns), values, ends
        self._length, self._path = length, path

    @classmethod
    def of(cls, examples: Sequence[Example], columns: Mapping[str, Column]) -> "Store":
        """Examples in memory; of the columns, those that the examples have."""
        present = _present(examples, columns)
        values, ends = _join(examples, present)
        return cls(present, values, ends, len(examples))

    @classmethod
    def write(cls, path: Path, parts: Iterable[Sequence[Example]], columns: Mapping[str, Column]) -> "Store":
        """Write the examples to a new folder, part by part, all or nothing, and open it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        totals = dict.fromkeys(columns, 0)
        length = 0
        with _unless_written(path), atomic(path) as unfinished:
            unfinished.mkdir()
            for name in columns:
                (unfinished / f"{name}.values").touch()
            for examples in filter(len, parts):
                _check_names(examples, columns, length)
                values, ends = _join(examples, columns, first=length)
                length += len(examples)
                for name in columns:
                    _append(unfinished / f"{name}.values", values[name])
                    if name in ends:
                        _append(unfinished / f"{name}.ends", ends[name] + totals[name])
                        totals[name] += int(ends[name][-1])
            about = {"length": length, "columns": to_json(columns)}
            (unfinished / "store.json").write_text(json.dumps(about), encoding="utf-8")
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """The store in a folder."""
        about = json.loads((path / "store.json").read_text(encoding="utf-8"))
        columns = from_json(about["columns"])
        values = {
            name: _map(path / f"{name}.values", column.storage_dtype, column.shape) for name, column in columns.items()
        }
        ends = {name: _map(path / f"{name}.ends", np.int64) for name, column in columns.items() if column.ragged}
        return cls(columns, values, ends, about["length"], path)

    @property
    def lengths(self) -> np.ndarray:
        """Number of items, [examples, ragged columns]."""
        lengths = [np.diff(ends, prepend=0) for ends in self.ends.values()]
        return np.stack(lengths, axis=1) if lengths else np.zeros((len(self), 0), int)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None:
            return Store.open, (self._path,)
        return Store, (self.columns, self.values, self.ends, self._length)

    def item(self, index: int) -> dict[str, np.ndarray]:
        return {name: self._item(name, index) for name in self.columns}

    def _item(self, name: str, index: int) -> np.ndarray:
        if name not in self.ends:
            return self.values[name][index]
        ends = self.ends[name]
        return self.values[name][ends[index - 1] if index else 0 : ends[index]]


@contextmanager
def _unless_written(path: Path) -> Iterator[None]:
    """Where another process has written the same folder in the meantime, that one is as good."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not path.is_dir():
            raise


def _present(examples: Sequence[Example], columns: Mapping[str, Column]) -> dict[str, Column]:
    present = {name: column for name, column in columns.items() if not examples or name in examples[0]}
    _check_names(examples, present, 0)
    return present


def _check_names(examples: Sequence[Example], columns: Mapping[str, Column], first: int) -> None:
    for number, example in enumerate(examples, first):
        if example.keys() != columns.keys():
            given, expected = ", ".join(example) or "nothing", ", ".join(columns)
            raise UserError(f"example {number} has {given}; the columns of the task are {expected}")


def _join(
    examples: Sequence[Example], columns: Mapping[str, Column], *, first: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of each column one after the other, and where each example ends in those that are ragged."""
    values, ends = {}, {}
    for name, column in columns.items():
        values[name], lengths = column.join(name, [example[name] for example in examples], first=first)
        if column.ragged:
            ends[name] = np.cumsum(lengths, dtype=np.int64)
    return values, ends


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        array.tofile(file)


def _map(path: Path, dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
    # A plain array over the map: slices of np.memmap itself are slow.
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, *shape), dtype)
    return np.asarray(np.memmap(path, dtype, mode="r")).reshape(-1, *shape)
