"""Encoded examples one after the other in flat arrays, in memory or mapped from disk."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.atomic import atomic
from transformer_jax.data.source import Lazy
from transformer_jax.errors import UserError

Example = Mapping[str, Sequence[int] | np.ndarray]
"""Named sequences of ids: `{"source": [...], "target": [...]}`."""

INT32 = np.iinfo(np.int32)  # what batches are made of


class Store(Lazy[Example]):
    """Examples by number. `ids[name]` holds those of all examples, `ends[name][i]` says where example i ends.

    A store on disk is mapped, not read: it costs no memory, and another process opens it again by its path.
    """

    def __init__(self, ids: dict[str, np.ndarray], ends: dict[str, np.ndarray], path: Path | None = None):
        self.ids, self.ends, self._path = ids, ends, path

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Store":
        """A store in memory."""
        return cls._of(examples)

    @classmethod
    def _of(
        cls, examples: Sequence[Example], *, low: int = INT32.min, high: int = INT32.max, first: int = 0
    ) -> "Store":
        """Examples whose ids must be from `low` to `high`; the first has this number."""
        names = list(examples[0]) if examples else []
        ids = {name: _joined(name, [x[name] for x in examples], low, high, first) for name in names}
        return cls(ids, {name: np.cumsum([len(x[name]) for x in examples]) for name in names})

    @classmethod
    def write(cls, path: Path, parts: Iterable[Sequence[Example]], *, vocab_size: int) -> "Store":
        """Write the examples to a new folder, part by part, all or nothing, and open it."""
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        high = min(np.iinfo(dtype).max, INT32.max)
        path.parent.mkdir(parents=True, exist_ok=True)
        totals: dict[str, int] = {}
        count = 0
        with atomic(path) as unfinished:
            unfinished.mkdir()
            for examples in filter(len, parts):
                part = cls._of(examples, low=0, high=high, first=count)
                count += len(part)
                for name in part.ids:
                    total = totals.get(name, 0)
                    _append(unfinished / f"{name}.ids", part.ids[name].astype(dtype))
                    _append(unfinished / f"{name}.ends", part.ends[name].astype(np.int64) + total)
                    totals[name] = total + int(part.ends[name][-1])
            (unfinished / "store.json").write_text(json.dumps({"names": list(totals), "dtype": dtype.__name__}))
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """The store in a folder."""
        about = json.loads((path / "store.json").read_text())
        ids = {name: _map(path / f"{name}.ids", about["dtype"]) for name in about["names"]}
        return cls(ids, {name: _map(path / f"{name}.ends", np.int64) for name in about["names"]}, path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sequences that an example consists of."""
        return tuple(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """Number of ids, [examples, names]."""
        lengths = [np.diff(ends, prepend=0) for ends in self.ends.values()]
        return np.stack(lengths, axis=1) if lengths else np.zeros((0, 0), int)

    def __len__(self) -> int:
        return len(next(iter(self.ends.values()))) if self.ends else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (Store, (self.ids, self.ends)) if self._path is None else (Store.open, (self._path,))

    def item(self, number: int) -> Example:
        return {
            name: self.ids[name][ends[number - 1] if number else 0 : ends[number]] for name, ends in self.ends.items()
        }


def _joined(name: str, columns: Sequence[Sequence[int] | np.ndarray], low: int, high: int, first: int) -> np.ndarray:
    """The ids of a column one after the other. NumPy would wrap or truncate what does not fit; here it is an error."""
    filled = [column for column in columns if len(column)]
    try:
        ids = np.concatenate(list(map(np.asarray, filled))) if filled else np.zeros(0, np.int32)
    except ValueError:  # sequences of sequences
        ids = np.zeros(0)
    if ids.ndim == 1 and ids.dtype.kind in "iu" and (not len(ids) or (low <= ids.min() and ids.max() <= high)):
        return ids.astype(np.int32)
    for number, column in enumerate(columns, first):
        for value in column.tolist() if isinstance(column, np.ndarray) else column:
            if not isinstance(value, (int, np.integer)) or not low <= value <= high:
                raise UserError(f"example {number} has {value!r} in {name!r}; give integers from {low} to {high}")
    return np.concatenate([np.asarray(column, np.int32) for column in columns])


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        array.tofile(file)


def _map(path: Path, dtype: Any) -> np.ndarray:
    # A plain array over the map: slices of np.memmap itself are slow.
    return np.asarray(np.memmap(path, dtype, mode="r")) if path.stat().st_size else np.zeros(0, dtype)
