"""Pairs of text held in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from transformer_jax.data.source import Record, Source, Split, check_split, check_text
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Records(Source[Record]):
    """Pairs of text held in memory, for notebooks: `Records(train=[("a source", "its target")])`."""

    train: tuple[tuple[str, str], ...]
    """Pairs (source, target) to train on."""
    valid: tuple[tuple[str, str], ...] = ()
    """Pairs to follow the training with."""
    test: tuple[tuple[str, str], ...] = ()
    """Pairs to judge the result by."""
    allow_empty: bool = False
    """Keep pairs of which a side is empty; otherwise they are an error that names them."""

    def __post_init__(self) -> None:
        for name in get_args(Split):
            object.__setattr__(self, name, self._pairs(name))

    def split(self, name: Split) -> Sequence[Record]:
        """The pairs of "train", "valid" or "test"."""
        check_split(name)
        return [{"source": source, "target": target} for source, target in getattr(self, name)]

    def _pairs(self, name: Split) -> tuple[tuple[str, str], ...]:
        checked = []
        for index, pair in enumerate(getattr(self, name)):
            if not isinstance(pair, (tuple, list)) or [type(text) for text in pair] != [str, str]:
                raise UserError(f"{name}[{index}] is {pair!r}; give a pair of strings, (source, target)")
            for side, text in zip(("source", "target"), pair, strict=True):
                check_text(text, side, f"{name}[{index}]".__str__, allow_empty=self.allow_empty)
            checked.append((pair[0], pair[1]))
        return tuple(checked)
