"""Documents as one stream, cut into rows of equal length: no padding, and no document sees another."""

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, Chance
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError


class Chunks:
    """A layout of documents `{name: ids}`, one after the other.

    A row begins with the last `overlap` ids of the row before, and has `length` more. With an overlap of 1, every id of
    the stream but the first is predicted once from those before it. `NAME_segments` says which document an id belongs
    to: 1, 2, ... within the row and 0 for padding.
    """

    def __init__(self, store: Store, *, length: int, batch_rows: int, pad_id: int, overlap: int = 1):
        if length < 1 or batch_rows < 1:
            raise UserError(f"length={length} and batch_rows={batch_rows} must be at least 1")
        (self._name,) = store.names
        self._store = store  # not its arrays, which a worker process would be sent rather than map
        self._length, self._overlap, self._pad_id = length, overlap, pad_id
        num_rows = -(-max(len(self._ids) - overlap, 0) // length)
        self.buckets = [Bucket(num_rows, batch_rows)]
        self.padding = 1 - len(self._ids) / max(num_rows * length + overlap, 1)
        """The share of positions that hold padding."""

    @property
    def _ids(self) -> np.ndarray:
        return self._store.ids[self._name]

    def describe(self) -> str:
        """What there is, for people."""
        return f"{len(self._ids):,} tokens, {self.padding:.1%} padding"

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""
        stream, ends = self._ids, self._store.ends[self._name]
        ids = np.full((count, self._overlap + self._length), self._pad_id, np.int32)
        segments = np.zeros_like(ids)
        for place, number in enumerate(numbers):
            start = int(number) * self._length
            span = stream[start : start + self._overlap + self._length]
            document = np.searchsorted(ends, start + np.arange(len(span)), side="right")
            ids[place, : len(span)] = span
            # Documents are counted anew in each row; an empty one between two others leaves no gap.
            segments[place, : len(span)] = 1 + np.cumsum(np.diff(document, prepend=document[:1]) > 0)
        return {self._name: ids, f"{self._name}_segments": segments}
