"""Examples in rows: one to a row among others of like length, or several packed into one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, RowRng
from transformer_jax.data.packing import pack
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class BatchingConfig:
    """How examples become batches."""

    tokens: int = 4096
    """Most positions of a batch in its longest column, padding included."""
    rows: int | None = None
    """Rows of a batch, whatever their length; None derives them from batching.tokens."""
    num_buckets: int = 4
    """Number of shapes that batches come in, each compiled once, when every example has a row of its own."""
    pack_length: int | None = None
    """Positions of a row that several examples are packed into, without attending to each other; None gives each
    example a row of its own."""

    def __post_init__(self):
        for name in ("tokens", "rows", "num_buckets", "pack_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1; got {value}")

    def batch_rows(self, width: int) -> int:
        """Rows of a batch whose rows have so many positions."""
        return self.rows or max(1, self.tokens // width)


class Rows:
    """A layout of examples with as many of them in a row as the config says.

    Examples with a row of their own are divided into buckets of like length; packed ones into rows of `pack_length`
    positions, and those that are too long for it into rows of a second shape. `NAME_segments` says of each position of
    a ragged column which example of the row it belongs to: 1, 2, ..., and 0 for padding. A column that is not ragged
    has one item in a row, or, where rows are packed, one for each example.

    Args:
        store: the examples.
        config: how they become batches.
        max_lengths: the longest that the model can take, by column.
        too_long: whether an example that is longer is left out, or cut to its beginning and its last item, which is
            usually an end token.
        width_multiple: widths are rounded up to a multiple of it, within `max_lengths`, so that sets of about the same
            lengths share shapes.
    """

    def __init__(
        self,
        store: Store,
        config: BatchingConfig,
        *,
        max_lengths: Mapping[str, int] | None = None,
        too_long: Literal["leave_out", "cut"] = "leave_out",
        width_multiple: int = 1,
    ):
        if not store.ends and config.rows is None:
            raise UserError("the examples have no length to go by; set batching.rows to the rows of a batch")
        self._store, self._packed = store, config.pack_length is not None
        self._max_lengths = {name: (max_lengths or {}).get(name, np.iinfo(int).max) for name in store.ends}
        limit, lengths = np.array([*self._max_lengths.values()], int), store.lengths
        fits = (lengths <= limit).all(axis=1)
        members = np.flatnonzero(fits) if too_long == "leave_out" else np.arange(len(store))
        lengths = np.minimum(lengths, limit)[members]
        self._num_full = int((lengths >= limit).any(axis=1).sum()) if too_long == "cut" else 0
        divide = _packed_rows if self._packed else _rows_by_length
        self._widths: list[dict[str, int]] = []
        self._members: list[np.ndarray] = []  # of each bucket, row after row
        self._ends: list[np.ndarray] = []  # of each bucket, where the members of a row end
        self.buckets: list[Bucket] = []
        for inside, row_of, widths in divide(lengths, config) if len(members) else ():
            order = np.argsort(row_of, kind="stable")
            rounded = -(-widths // width_multiple) * width_multiple
            widths = np.maximum(np.minimum(rounded, np.maximum(widths, limit)), 1)  # also where all texts are empty
            self._members.append(members[inside[order]])
            self._ends.append(np.cumsum(np.bincount(row_of)))
            self._widths.append(dict(zip(store.ends, widths.tolist(), strict=True)))
            self.buckets.append(Bucket(len(self._ends[-1]), config.batch_rows(max(widths.tolist(), default=1))))
        positions = sum(sum(widths.values()) * n for widths, (n, _) in zip(self._widths, self.buckets, strict=True))
        self.padding = 1 - int(lengths.sum()) / max(positions, 1) if store.ends else 0.0
        """The fraction of positions that hold padding."""

    def describe(self) -> str:
        """What there is, for people."""
        count = sum(map(len, self._members))
        remark = ""
        if count < len(self._store):
            remark = f" ({len(self._store) - count:,} that are too long for the model are left out)"
        elif self._num_full:
            remark = f" ({self._num_full:,} have all the tokens that the model can read; what is longer is cut)"
        return f"{count:,} examples{remark}, {self.padding:.1%} padding"

    @property
    def members(self) -> np.ndarray | None:
        """The example of each row; None where rows are packed."""
        return None if self._packed else np.concatenate([np.zeros(0, int), *self._members])

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones."""
        members, ends = self._members[bucket], self._ends[bucket]
        batch = self._empty(bucket, count)
        for row, index in enumerate(indices):
            filled = dict.fromkeys(self._store.ends, 0)
            for segment, member in enumerate(members[ends[index - 1] if index else 0 : ends[index]]):
                for name, value in self._store[int(member)].items():
                    if name not in filled:
                        batch[name][(row, segment) if self._packed else row] = value
                        continue
                    value = self._cut(name, value)
                    span = slice(filled[name], filled[name] + len(value))
                    batch[name][row, span], batch[f"{name}_segments"][row, span] = value, segment + 1
                    filled[name] = span.stop
        return batch

    def _empty(self, bucket: int, count: int) -> Batch:
        most = int(np.diff(self._ends[bucket], prepend=0).max())
        batch: Batch = {}
        for name, column in self._store.columns.items():
            axes: tuple[int, ...] = (count, most) if self._packed else (count,)
            if column.ragged:
                axes = (count, self._widths[bucket][name])
                batch[f"{name}_segments"] = np.zeros(axes, np.int32)
            batch[name] = np.full((*axes, *column.shape), column.padding, column.dtype)
        return batch

    def _cut(self, name: str, value: np.ndarray) -> np.ndarray:
        limit = self._max_lengths[name]
        return value if len(value) <= limit else np.concatenate([value[: limit - 1], value[-1:]])


def _rows_by_length(lengths: np.ndarray, config: BatchingConfig):
    """Buckets of examples with a row each: (the examples, the row of each, the widths of a row)."""
    longest = lengths.max(axis=1, initial=1)
    bucket_of = np.searchsorted(_boundaries(longest, config.num_buckets), longest)
    for bucket in np.unique(bucket_of):
        inside = np.flatnonzero(bucket_of == bucket)
        yield inside, np.arange(len(inside)), lengths[inside].max(axis=0)


def _packed_rows(lengths: np.ndarray, config: BatchingConfig):
    """Buckets of examples that share rows. Each column of a row is as wide as its fraction of all items says."""
    if not lengths.shape[1]:
        raise UserError("examples without a ragged column cannot be packed; leave out batching.pack_length")
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
