"""Several sources as one, each with its share of the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from transformer_jax.data.source import Joined, Lazy, Source, Split
from transformer_jax.errors import UserError

LONGEST = 10_000  # positions of a pattern; weights that would need more are rounded to it


@dataclass(frozen=True)
class Mixture(Source[Any]):
    """Several sources as one.

    A pass over train has every record of every source at least once, and as often again as the weights ask for. Valid
    and test are those of the sources one after another.
    """

    sources: tuple[Source[Any], ...]
    """Sources to mix."""
    weights: tuple[float, ...]
    """Relative weight of each source in the training: 3 and 1 give three records of the first to one of the second,
    whatever their sizes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "weights", tuple(self.weights))
        if not self.sources:
            raise UserError("sources is empty; give at least one")
        if len(self.sources) != len(self.weights):
            raise UserError(f"there are {len(self.sources)} sources but {len(self.weights)} weights; give one for each")
        if not all(0 < weight < math.inf for weight in self.weights):
            raise UserError(f"weights={self.weights} must all be above 0; leave out what is not wanted")

    def split(self, name: Split) -> Sequence[Any]:
        """The records of "train", mixed, or those of "valid" or "test" of each source in turn."""
        splits = [_Named(source.split(name), f"sources[{number}]") for number, source in enumerate(self.sources)]
        return _Mixed(splits, self.weights) if name == "train" else Joined(splits)

    def fields(self) -> tuple[str, ...]:
        """What the records of all sources have."""
        first, *others = (source.fields() for source in self.sources)
        return tuple(field for field in first if all(field in other for other in others))

    def files(self) -> Sequence[Path]:
        """The files of all sources."""
        return [path for source in self.sources for path in source.files()]

    def tags(self) -> tuple[str, ...]:
        """The tags of all sources."""
        return tuple(dict.fromkeys(tag for source in self.sources for tag in source.tags()))

    def prompt(self, text: str) -> str:
        """As the first source has it."""
        return self.sources[0].prompt(text)


@dataclass(frozen=True)
class _Named(Lazy[Any]):
    """Records of which what is wrong with them names their source."""

    records: Sequence[Any]
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def item(self, index: int) -> Any:
        try:
            return self.records[index]
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error


class _Mixed(Lazy[Any]):
    """Records in a pattern that repeats: of any first n, a source gives its share of n to within one."""

    def __init__(self, splits: Sequence[Sequence[Any]], weights: Sequence[float]):
        for number, split in enumerate(splits):
            if not len(split):
                raise UserError(f"sources[{number}] has no records in train; leave it out")
        self._splits = splits
        self._pattern = _pattern(_integers(weights))
        self._positions: list[list[int]] = [[] for _ in splits]  # of each source in the pattern
        self._ranks = []  # of each position among those of its source
        for position, number in enumerate(self._pattern):
            self._ranks.append(len(self._positions[number]))
            self._positions[number].append(position)
        self._length = 1 + max(self._position(number, len(split) - 1) for number, split in enumerate(splits))

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        periods, within = divmod(index, len(self._pattern))
        number = self._pattern[within]
        own = periods * len(self._positions[number]) + self._ranks[within]
        return self._splits[number][own % len(self._splits[number])]

    def _position(self, number: int, own: int) -> int:
        """The index at which a source's record of its own index comes: the inverse of `item`."""
        periods, rank = divmod(own, len(self._positions[number]))
        return periods * len(self._pattern) + self._positions[number][rank]


def _integers(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportions."""
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 as it is written, a tenth
    unit = Fraction(math.gcd(*(w.numerator for w in exact)), math.lcm(*(w.denominator for w in exact)))
    unit = max(unit, Fraction(sum(exact), LONGEST))
    return [max(1, round(weight / unit)) for weight in exact]


def _pattern(counts: Sequence[int]) -> list[int]:
    """Which source each position of a period is for, spread evenly (the chairman assignment; Tijdeman 1980).

    After n positions a source has had its share of n, rounded down or up. To keep that, a position goes to a source
    that is not ahead of its share, and among these to the one that would first fall a whole record behind.
    """
    period, had, pattern = sum(counts), [0] * len(counts), []
    for position in range(1, period + 1):
        behind = [number for number, count in enumerate(counts) if had[number] * period < position * count]
        chosen = min(behind, key=lambda number: (had[number] + 1) / counts[number])
        had[chosen] += 1
        pattern.append(chosen)
    return pattern
