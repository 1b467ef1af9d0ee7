"""Batches of examples of like length, each a function of the seed and its number alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from transformer_jax.errors import UserError

Example = Mapping[str, Sequence[int]]
"""Named sequences of ids: `{"source": [...], "target": [...]}`."""


@dataclass(frozen=True)
class BatchingConfig:
    """How examples become batches."""

    tokens: int = 4096
    """Most positions of a batch on its longer side, padding included."""
    num_buckets: int = 4
    """Number of shapes that batches come in; each is compiled once."""

    def __post_init__(self):
        if self.tokens < 1 or self.num_buckets < 1:
            raise UserError(f"tokens={self.tokens} and num_buckets={self.num_buckets} must be at least 1")


class Batches:
    """`batches[n]` is the n-th batch of a run without end: epoch after epoch, each example once in each.

    Examples of like length share a bucket, and a bucket is one array shape. The last batch of a bucket is filled up
    with rows of padding, and so is every batch until its rows are a multiple of `multiple`. Widths are rounded up to a
    multiple of `width_multiple`, so that sets of about the same lengths share their shapes.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        config: BatchingConfig,
        *,
        pad_id: int,
        seed: int = 0,
        multiple: int = 1,
        width_multiple: int = 1,
    ):
        if not examples:
            raise UserError("there are no examples to make batches of")
        self._examples, self._pad_id, self._seed, self._multiple = examples, pad_id, seed, multiple
        lengths = np.array([[len(ids) for ids in example.values()] for example in examples])
        longest = lengths.max(axis=1)
        bucket_of = np.searchsorted(_boundaries(longest, config.num_buckets), longest)
        self._buckets = [np.flatnonzero(bucket_of == bucket) for bucket in np.unique(bucket_of)]
        widths = [-(-lengths[bucket].max(axis=0) // width_multiple) * width_multiple for bucket in self._buckets]
        self._widths = [dict(zip(examples[0], map(int, sizes), strict=True)) for sizes in widths]
        self._rows = [max(1, config.tokens // max(widths.values())) for widths in self._widths]
        self._per_bucket = [-(-len(b) // rows) for b, rows in zip(self._buckets, self._rows, strict=True)]
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    @property
    def per_epoch(self) -> int:
        """Number of batches in which each example comes once."""
        return sum(self._per_bucket)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        epoch, index = divmod(number, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(np.random.default_rng((self._seed, epoch))))
        return self._batch(*self._epoch[1][index])

    def once(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Each example once, unshuffled: the numbers of the examples of a batch, and the batch, which may be longer."""
        for bucket, members in self._plan(None):
            yield members, self._batch(bucket, members)

    def _plan(self, random: np.random.Generator | None) -> list[tuple[int, np.ndarray]]:
        """The batches of an epoch, each as its bucket and its examples."""
        plan = []
        for number, (members, rows) in enumerate(zip(self._buckets, self._rows, strict=True)):
            members = members if random is None else random.permutation(members)
            plan += [(number, members[start : start + rows]) for start in range(0, len(members), rows)]
        order = range(len(plan)) if random is None else random.permutation(len(plan))
        return [plan[i] for i in order]

    def _batch(self, bucket: int, members: np.ndarray) -> dict[str, np.ndarray]:
        rows = -(-self._rows[bucket] // self._multiple) * self._multiple
        batch = {name: np.full((rows, width), self._pad_id, np.int32) for name, width in self._widths[bucket].items()}
        for row, member in enumerate(members):
            for name, ids in self._examples[member].items():
                batch[name][row, : len(ids)] = ids
        return batch | {"slot": np.arange(rows, dtype=np.int32)}


def _boundaries(lengths: np.ndarray, count: int) -> np.ndarray:
    """The at most `count` bucket lengths that pad least: the last one of each bucket, in order."""
    values, frequency = np.unique(lengths, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(frequency)])
    # cost[j]: least positions for the lengths before j; cut[k][j]: where the last of k buckets begins.
    cost = upto * np.concatenate([[0], values])
    cuts = [np.zeros(len(values) + 1, int)]
    for _ in range(min(count, len(values)) - 1):
        options = [cost[:j] + (upto[j] - upto[:j]) * values[j - 1] for j in range(1, len(values) + 1)]
        cuts.append(np.array([0] + [int(np.argmin(option)) for option in options]))
        cost = np.array([0] + [option.min() for option in options])
    boundaries, end = [], len(values)
    while end > 0:
        boundaries.append(values[end - 1])
        end = cuts.pop()[end] if cuts else 0
    return np.array(boundaries[::-1])
