"""What a set of parallel text is: splits of records, and how a user's text becomes a source."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypedDict

Split = Literal["train", "valid", "test"]


class Record(TypedDict):
    """One example: a source text and its target text."""

    source: str
    target: str


class Source(Protocol):
    """A frozen dataclass, so that it can stand in a config."""

    def split(self, name: Split) -> Sequence[Record]:
        """The records of a split, by number; each is made or read when it is asked for."""

    def tags(self) -> tuple[str, ...]:
        """Words with a meaning of their own that a source may begin with; each becomes one token."""

    def prompt(self, text: str) -> str:
        """The source for a text as a user types it."""
