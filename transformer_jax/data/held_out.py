"""Which records of the training set are held out where there are no others to evaluate on."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.data.source import Lazy, Split

FEWEST = 20  # records of train for each one held out
MASK = 2**64 - 1


def split_indices(name: Split, total: int, held_out: int, *, with_test: bool) -> Sequence[int]:
    """The indices of the records of a split: one of each group of neighbours for valid, and another one for test.

    Which one of a group it is looks random, and is always the same: a fixed distance could be that of a pattern in the
    file, such as labels that alternate.

    Args:
        name: of the split.
        total: number of records.
        held_out: number of records of valid, and of test; at most one in twenty of all.
        with_test: whether test is held out too.
    """
    count = min(held_out, total // FEWEST)
    groups = _Groups(count, max(FEWEST, total // max(count, 1)), 2 if with_test else 1)
    return _Others(groups, total) if name == "train" else _HeldOut(groups, 0 if name == "valid" else 1)


@dataclass(frozen=True)
class _Groups:
    """Groups of `size` neighbours, of each of which so many records are held out."""

    count: int
    size: int
    num_held_out: int

    def offsets(self, group: int) -> tuple[int, ...]:
        """The positions in a group that are held out: the first for valid, the second for test."""
        first = _mix(2 * group) % self.size
        second = (first + 1 + _mix(2 * group + 1) % (self.size - 1)) % self.size  # any other
        return (first, second)[: self.num_held_out]


@dataclass(frozen=True)
class _HeldOut(Lazy[int]):
    """One record of each group."""

    groups: _Groups
    which: int

    def __len__(self) -> int:
        return self.groups.count if self.which < self.groups.num_held_out else 0

    def item(self, index: int) -> int:
        return index * self.groups.size + self.groups.offsets(index)[self.which]


@dataclass(frozen=True)
class _Others(Lazy[int]):
    """The numbers below `total` that are not held out."""

    groups: _Groups
    total: int

    def __len__(self) -> int:
        return self.total - self.groups.count * self.groups.num_held_out

    def item(self, index: int) -> int:
        group, within = divmod(index, self.groups.size - self.groups.num_held_out)
        if group >= self.groups.count:
            return index + self.groups.count * self.groups.num_held_out
        for offset in sorted(self.groups.offsets(group)):  # each that is passed makes the next come sooner
            within += within >= offset
        return group * self.groups.size + within


def _mix(number: int) -> int:
    """A hash of a number (SplitMix64; Steele et al. 2014): the same in every process and version."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)
