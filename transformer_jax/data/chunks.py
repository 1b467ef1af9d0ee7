"""Documents as one stream, cut into rows of equal length: no padding, and no document sees another."""

import numpy as np

from transformer_jax.data.batches import Batch, Bucket
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError


class Chunks:
    """A layout of documents `{name: ids}`, one after the other, for predicting each token from those before it.

    A row has `length` + 1 ids and begins with the last of the row before, so that every id of the stream is predicted
    once; `NAME_segments` says which document an id belongs to: 1, 2, ... within the row and 0 for padding.
    """

    def __init__(self, store: Store, *, length: int, batch_rows: int, pad_id: int):
        if length < 1 or batch_rows < 1:
            raise UserError(f"length={length} and batch_rows={batch_rows} must be at least 1")
        (self._name,) = store.names
        self._ids, self._ends = store.ids[self._name], store.ends[self._name]
        self._length, self._pad_id = length, pad_id
        self.buckets = [Bucket(-(-max(len(self._ids) - 1, 0) // length), batch_rows)]

    def rows(self, bucket: int, numbers: np.ndarray, count: int) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""
        ids = np.full((count, self._length + 1), self._pad_id, np.int32)
        segments = np.zeros_like(ids)
        for place, number in enumerate(numbers):
            start = int(number) * self._length
            span = self._ids[start : start + self._length + 1]
            document = np.searchsorted(self._ends, start + np.arange(len(span)), side="right")
            ids[place, : len(span)] = span
            # Documents are counted anew in each row; an empty one between two others leaves no gap.
            segments[place, : len(span)] = 1 + np.cumsum(np.diff(document, prepend=document[:1]) > 0)
        return {self._name: ids, f"{self._name}_segments": segments}
