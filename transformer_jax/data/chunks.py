"""Documents as one stream, cut into rows of equal length: no padding, and no document sees another."""

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, RowRng
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError


class Chunks:
    """A layout of documents, one after the other.

    A row begins with the last `overlap` items of the row before, and has `length` more. With an overlap of 1, every
    token of the stream but the first is predicted once from those before it. Several ragged columns of the same
    lengths, such as ids and loss weights, are cut alike. `NAME_segments` says which document an item of a column
    belongs to: 1, 2, ... within the row and 0 for padding. Columns that are not ragged belong to documents, not to
    rows, and are left out.
    """

    members = None

    def __init__(self, store: Store, *, length: int, batch_rows: int, overlap: int = 1):
        if length < 1 or batch_rows < 1:
            raise UserError(f"length={length} and batch_rows={batch_rows} must be at least 1")
        if not store.ends:
            raise ValueError("the examples have no ragged column to make a stream of")
        self._store = store  # not its arrays, which a worker process would be sent rather than map
        self._names = tuple(store.ends)
        for name in self._names[1:]:
            if not np.array_equal(store.ends[name], store.ends[self._names[0]]):
                raise UserError(f"the columns {self._names[0]!r} and {name!r} of a document must have the same length")
        self._length, self._overlap = length, overlap
        num_rows = -(-max(self._num_items - overlap, 0) // length)
        self.buckets = [Bucket(num_rows, batch_rows)]
        self.padding = 1 - self._num_items / max(num_rows * length + overlap, 1)
        """The fraction of positions that hold padding."""

    @property
    def _num_items(self) -> int:
        return len(self._store.values[self._names[0]])

    def describe(self) -> str:
        """What there is, for people."""
        return f"{self._num_items:,} tokens, {self.padding:.1%} padding"

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones."""
        width, ends = self._overlap + self._length, self._store.ends[self._names[0]]
        columns = self._store.columns
        batch = {
            name: np.full((count, width, *columns[name].shape), columns[name].padding, columns[name].dtype)
            for name in self._names
        }
        segments = np.zeros((count, width), np.int32)
        for row, index in enumerate(indices):
            start = int(index) * self._length
            stop = min(start + width, self._num_items)
            document = np.searchsorted(ends, np.arange(start, stop), side="right")
            # Documents are counted anew in each row; an empty one between two others leaves no gap.
            segments[row, : stop - start] = 1 + np.cumsum(np.diff(document, prepend=document[:1]) > 0)
            for name in self._names:
                batch[name][row, : stop - start] = self._store.values[name][start:stop]
        return batch | {f"{name}_segments": segments for name in self._names}
