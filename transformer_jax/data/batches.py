"""The order of a run: which rows make its n-th batch, as a function of the seed and n alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from transformer_jax.errors import UserError

Batch = dict[str, np.ndarray]

RowRng = Callable[[int], np.random.Generator]
"""The random generator of a row, by its position in the batch: in training a function of (seed, batch, slot), and where
each row comes once, of the row itself."""


class Bucket(NamedTuple):
    """Rows of one shape: how many there are, and how many of them make a batch."""

    num_rows: int
    batch_rows: int


class Layout(Protocol):
    """How examples lie in rows. Rows of a bucket have the same shape, so each bucket is compiled once."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The shapes that there are."""

    @property
    def members(self) -> np.ndarray | None:
        """The example of each row, bucket after bucket; None where a row is not one example."""

    def describe(self) -> str:
        """What there is, for people: how many examples or tokens, how much padding."""

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones."""


@dataclass(frozen=True)
class Shard:
    """The rows of every batch that one process makes: shard `index` of `count`, or several of them, in order."""

    index: int | tuple[int, ...] = 0
    count: int = 1

    @property
    def indices(self) -> tuple[int, ...]:
        """The shards that it makes."""
        return (self.index,) if isinstance(self.index, int) else self.index


class Batches:
    """`batches[n]` is the n-th batch of a run without end: epoch after epoch, each row once in each.

    It depends on the layout, the seed and n, so a run goes on at any n, and with any number of processes, of which each
    makes its own shard of the same batches. The last batch of a bucket is filled up with empty rows, and so is every
    batch until its rows are a multiple of `multiple`. `slot` is the position of a row in the global batch.
    """

    def __init__(self, layout: Layout, *, seed: int = 0, multiple: int = 1, shard: Shard = Shard()):
        if not any(bucket.num_rows for bucket in layout.buckets):
            raise UserError("there are no examples to make batches of")
        if multiple % shard.count:
            raise ValueError(f"batches of a multiple of {multiple} rows do not divide into {shard.count} shards")
        self._layout, self._seed, self._multiple, self._shard = layout, seed, multiple, shard
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    @property
    def per_epoch(self) -> int:
        """Number of batches in which each row comes once."""
        return sum(-(-bucket.num_rows // bucket.batch_rows) for bucket in self._layout.buckets)

    def __getitem__(self, number: int) -> Batch:
        epoch, index = divmod(number, self.per_epoch)
        kept = self._epoch  # read once: other threads may ask for another epoch
        if kept[0] != epoch:
            kept = self._epoch = (epoch, self._shuffled(np.random.default_rng((self._seed, epoch))))
        bucket, indices = kept[1][index]
        # Four words each, the last of which keeps apart the randomness here, in `once` and of the order of an epoch.
        return self._batch(bucket, indices, lambda slot, row: (self._seed, number, slot, 1))

    def once(self, limit: int | None = None) -> Iterator[tuple[np.ndarray, Batch]]:
        """Each row once, unshuffled: the indices of a batch's rows in the layout, and this shard of the batch.

        The whole batch may have more rows than indices: the rest of them are empty.

        Args:
            limit: of more rows than this, so many, evenly spaced.
        """
        first = np.cumsum([0, *(bucket.num_rows for bucket in self._layout.buckets)])
        chosen = _evenly_spaced(int(first[-1]), limit)
        for number, (num_rows, _) in enumerate(self._layout.buckets):
            inside = chosen[(first[number] <= chosen) & (chosen < first[number] + num_rows)] - first[number]
            for bucket, indices in self._batches_of(number, inside):
                yield first[bucket] + indices, self._batch(bucket, indices, partial(self._words_of_row, bucket))

    def _words_of_row(self, bucket: int, slot: int, row: int) -> tuple[int, ...]:
        return self._seed, bucket, row, 2

    def _shuffled(self, rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
        """The batches of an epoch, each as its bucket and the indices of its rows there."""
        batches = [
            batch
            for number, (num_rows, _) in enumerate(self._layout.buckets)
            for batch in self._batches_of(number, rng.permutation(num_rows))
        ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _batches_of(self, bucket: int, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        size = self._layout.buckets[bucket].batch_rows
        return [(bucket, rows[start : start + size]) for start in range(0, len(rows), size)]

    def _batch(self, bucket: int, indices: np.ndarray, words: Callable[[int, int], tuple[int, ...]]) -> Batch:
        """This shard's rows of a batch; `words` seed the generator of the row in a slot."""

        def rng(position: int) -> np.random.Generator:
            return np.random.default_rng(words(int(slots[position]), int(mine[position])))

        batch_rows = self._layout.buckets[bucket].batch_rows
        share = -(-batch_rows // self._multiple) * self._multiple // self._shard.count
        first = np.array(self._shard.indices, np.int32)[:, None] * share
        slots = (first + np.arange(share, dtype=np.int32)).reshape(-1)
        mine = indices[slots[slots < len(indices)]]
        return self._layout.rows(bucket, mine, len(slots), rng) | {"slot": slots}


def _evenly_spaced(total: int, limit: int | None) -> np.ndarray:
    if limit is None or limit >= total:
        return np.arange(total)
    return (np.arange(limit) * total) // limit
