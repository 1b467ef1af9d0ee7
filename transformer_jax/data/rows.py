"""Examples in rows: one to a row among others of like length, or several packed into one."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, Chance
from transformer_jax.data.packing import pack
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class BatchingConfig:
    """How examples become batches."""

    tokens: int = 4096
    """Most positions of a batch on its longer side, padding included."""
    rows: int | None = None
    """Rows of a batch, whatever their length; None goes by tokens."""
    num_buckets: int = 4
    """Number of shapes that batches come in, each compiled once, when every example has its own row."""
    pack_length: int | None = None
    """Put several examples into a row of this many positions, where they do not see each other. None gives each a row
    of its own."""

    def __post_init__(self):
        for name in ("tokens", "rows", "num_buckets", "pack_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1; got {value}")

    def batch_rows(self, width: int) -> int:
        """Rows of a batch whose rows have so many positions."""
        return self.rows or max(1, self.tokens // width)


class Rows:
    """A layout of examples, each a dict of named sequences of ids.

    Examples with a row of their own are divided into buckets of like length; packed ones into rows of `pack_length`
    positions, and those that are too long for it into rows of a second shape. A packed row has `NAME_segments` beside
    each sequence: 1, 2, ... for its examples and 0 for padding.

    Args:
        store: the examples.
        config: how they become batches.
        pad_id: fills a row up.
        members: the numbers of the examples to lay out; all by default.
        width_multiple: widths are rounded up to a multiple of it, so that sets of about the same lengths share shapes,
        width_limit: but not beyond these.
    """

    def __init__(
        self,
        store: Store,
        config: BatchingConfig,
        *,
        pad_id: int,
        members: np.ndarray | None = None,
        width_multiple: int = 1,
        width_limit: Mapping[str, int] | None = None,
    ):
        self._store, self._pad_id, self._packed = store, pad_id, config.pack_length is not None
        members = np.arange(len(store)) if members is None else members
        lengths = store.lengths[members]
        divide = _packed_rows if self._packed else _rows_by_length
        limit = np.array([np.iinfo(int).max if width_limit is None else width_limit[name] for name in store.names])
        self._widths: list[np.ndarray] = []
        self._members: list[np.ndarray] = []  # of each bucket, row after row
        self._ends: list[np.ndarray] = []  # of each bucket, where the members of a row end
        self.buckets: list[Bucket] = []
        for inside, row_of, widths in divide(lengths, config) if len(members) else ():
            order = np.argsort(row_of, kind="stable")
            rounded = -(-widths // width_multiple) * width_multiple
            widths = np.minimum(rounded, np.maximum(widths, limit))
            self._members.append(members[inside[order]])
            self._ends.append(np.cumsum(np.bincount(row_of)))
            self._widths.append(widths)
            self.buckets.append(Bucket(len(self._ends[-1]), config.batch_rows(int(widths.max()))))
        positions = sum(int(widths.sum()) * n for widths, (n, _) in zip(self._widths, self.buckets, strict=True))
        self.padding = 1 - int(lengths.sum()) / max(positions, 1)
        """The share of positions that hold padding."""

    def describe(self) -> str:
        """What there is, for people."""
        count, skipped = len(self.members), len(self._store) - len(self.members)
        without = f" ({skipped:,} that are too long for the model are left out)" if skipped else ""
        return f"{count:,} examples{without}, {self.padding:.1%} padding"

    @property
    def members(self) -> np.ndarray:
        """The number of each example, in the order of the rows."""
        return np.concatenate(self._members)

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""
        shapes = [
            (name, (count, int(width))) for name, width in zip(self._store.names, self._widths[bucket], strict=True)
        ]
        ids = {name: np.full(shape, self._pad_id, np.int32) for name, shape in shapes}
        segments = {name: np.zeros(shape, np.int32) for name, shape in shapes}
        members, ends = self._members[bucket], self._ends[bucket]
        for place, row in enumerate(numbers):
            filled = dict.fromkeys(ids, 0)
            for segment, member in enumerate(members[ends[row - 1] if row else 0 : ends[row]], 1):
                for name, sequence in self._store[int(member)].items():
                    span = slice(filled[name], filled[name] + len(sequence))
                    ids[name][place, span], segments[name][place, span] = sequence, segment
                    filled[name] = span.stop
        return ids | {f"{name}_segments": array for name, array in segments.items()} if self._packed else ids


def _rows_by_length(lengths: np.ndarray, config: BatchingConfig):
    """Buckets of examples with a row each: (the examples, the row of each, the widths of a row)."""
    longest = lengths.max(axis=1)
    bucket_of = np.searchsorted(_boundaries(longest, config.num_buckets), longest)
    for bucket in np.unique(bucket_of):
        inside = np.flatnonzero(bucket_of == bucket)
        yield inside, np.arange(len(inside)), lengths[inside].max(axis=0)


def _packed_rows(lengths: np.ndarray, config: BatchingConfig):
    """Buckets of examples that share rows. The sides of a row are as wide as the text on them is long."""
    totals = lengths.sum(axis=0)
    capacity = np.maximum(np.ceil(config.pack_length * totals / totals.max()), 1).astype(int)
    fits = (lengths <= capacity).all(axis=1)
    for inside, widths in ((np.flatnonzero(fits), capacity), (np.flatnonzero(~fits), lengths.max(axis=0))):
        if len(inside):
            yield inside, pack(lengths[inside], widths), widths


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
