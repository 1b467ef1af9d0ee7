"""The order of a run: which rows make its n-th batch, as a function of the seed and n alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from transformer_jax.errors import UserError

Batch = dict[str, np.ndarray]

Chance = Callable[[int], np.random.Generator]
"""Where the chance in a row comes from, by its place in the batch: in training a function of (seed, batch, slot), and
where each row comes once, of the row itself."""


class Bucket(NamedTuple):
    """Rows of one shape: how many there are, and how many of them make a batch."""

    num_rows: int
    batch_rows: int


class Layout(Protocol):
    """How examples lie in rows. Rows of a bucket have the same shape, so each bucket is compiled once."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The shapes that there are."""

    def describe(self) -> str:
        """What there is, for people: how many examples or tokens, how much padding."""

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""


@dataclass(frozen=True)
class Part:
    """The share of every batch that one process makes: part `index` of `count`."""

    index: int
    count: int


WHOLE = Part(0, 1)


class Batches:
    """`batches[n]` is the n-th batch of a run without end: epoch after epoch, each row once in each.

    It depends on the layout, the seed and n, so a run goes on at any n, and with any number of processes, of which each
    makes its own part of the same batches. The last batch of a bucket is filled up with empty rows, and so is every
    batch until its rows are a multiple of `multiple`. `slot` is the place of a row in the whole batch.
    """

    def __init__(self, layout: Layout, *, seed: int = 0, multiple: int = 1, part: Part = WHOLE):
        if not any(bucket.num_rows for bucket in layout.buckets):
            raise UserError("there are no examples to make batches of")
        if multiple % part.count:
            raise ValueError(f"batches of a multiple of {multiple} rows do not divide into {part.count} parts")
        self._layout, self._seed, self._multiple, self._part = layout, seed, multiple, part
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    @property
    def per_epoch(self) -> int:
        """Number of batches in which each row comes once."""
        return sum(-(-bucket.num_rows // bucket.batch_rows) for bucket in self._layout.buckets)

    def __getitem__(self, number: int) -> Batch:
        epoch, index = divmod(number, self.per_epoch)
        kept = self._epoch  # read once: other threads may ask for another epoch
        if kept[0] != epoch:
            kept = self._epoch = (epoch, self._plan(np.random.default_rng((self._seed, epoch))))
        bucket, numbers = kept[1][index]
        # Four words each, the last of which keeps apart what is drawn here, in `once` and for the order of an epoch.
        return self._batch(bucket, numbers, lambda slot, row: (self._seed, number, slot, 1))[1]

    def once(self) -> Iterator[tuple[np.ndarray, Batch]]:
        """Each row once, unshuffled: the places of a batch's rows in the layout, and the batch, which may be longer."""
        first = np.cumsum([0, *(bucket.num_rows for bucket in self._layout.buckets)])
        for bucket, numbers in self._plan(None):
            mine, batch = self._batch(bucket, numbers, partial(self._words_of_row, bucket))
            yield first[bucket] + mine, batch

    def _words_of_row(self, bucket: int, slot: int, row: int) -> tuple[int, ...]:
        return self._seed, bucket, row, 2

    def _plan(self, random: np.random.Generator | None) -> list[tuple[int, np.ndarray]]:
        """The batches of an epoch, each as its bucket and its rows."""
        plan = []
        for bucket, (num_rows, batch_rows) in enumerate(self._layout.buckets):
            rows = np.arange(num_rows) if random is None else random.permutation(num_rows)
            plan += [(bucket, rows[start : start + batch_rows]) for start in range(0, num_rows, batch_rows)]
        order = range(len(plan)) if random is None else random.permutation(len(plan))
        return [plan[i] for i in order]

    def _batch(
        self, bucket: int, numbers: np.ndarray, words: Callable[[int, int], tuple[int, ...]]
    ) -> tuple[np.ndarray, Batch]:
        """This part's rows of a batch, and their arrays; `words` seed the chance of the row in a slot."""

        def chance(place: int) -> np.random.Generator:
            return np.random.default_rng(words(int(slots[place]), int(mine[place])))

        batch_rows = self._layout.buckets[bucket].batch_rows
        share = -(-batch_rows // self._multiple) * self._multiple // self._part.count
        slots = self._part.index * share + np.arange(share, dtype=np.int32)
        mine = numbers[slots[0] : slots[-1] + 1]
        return mine, self._layout.rows(bucket, mine, share, chance) | {"slot": slots}
