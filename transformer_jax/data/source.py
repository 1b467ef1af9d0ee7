"""What a set of text is: splits of records, and how a user's text becomes a source. And sequences to build one of."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_args

from transformer_jax.errors import UserError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Record(TypedDict):
    """One example: a source text and its target text."""

    source: str
    target: str


class Document(TypedDict):
    """One example: a text that stands by itself."""

    text: str


class Source(Protocol[T_co]):
    """Where examples of one kind come from. A frozen dataclass, so that it can stand in a config."""

    @abstractmethod
    def split(self, name: Split) -> Sequence[T_co]:
        """The records of a split, by number; each is made or read when it is asked for."""

    def fields(self) -> tuple[str, ...]:
        """What a record has: source and target unless it says otherwise."""
        return ("source", "target")

    def files(self) -> Sequence[Path]:
        """The files that train is read from, if any: a run that goes on notices when they have changed."""
        return ()

    def tags(self) -> tuple[str, ...]:
        """Words with a meaning of their own that a text may begin with; each becomes one token."""
        return ()

    def prompt(self, text: str) -> str:
        """What the model reads for a text as a user types it."""
        return text


def check_split(name: str) -> None:
    """Raise unless there is a split of this name."""
    if name not in get_args(Split):
        raise UserError(f"name={name!r} is not a split; use one of {', '.join(get_args(Split))}")


def check_text(text: Any, field: str, where: Callable[[], str], *, allow_empty: bool) -> str:
    """A text as a tokenizer can read it; what is none is an error that says where it comes from."""
    if not isinstance(text, str):
        shown = repr(text)
        raise UserError(f"{where()} has {shown[:40]}{'…' * (len(shown) > 40)} as {field!r}; give a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON, for one, can write half of a surrogate pair
            raise UserError(f"{where()} has {text[error.start]!a} in {field!r}, which is not a character") from error
    if not allow_empty and not text.strip():
        raise UserError(f"{where()} has an empty {field}; remove the pair, or set allow_empty=True to keep such pairs")
    return text


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    @abstractmethod
    def item(self, place: int) -> T:
        """The item at a place from 0 to the length."""

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]  # a range has the rules of a list: negative places, slices, IndexError
        return self.item(places) if isinstance(places, int) else [self.item(place) for place in places]


@dataclass(frozen=True)
class Chosen(Lazy[T]):
    """The items of another sequence that have these numbers."""

    items: Sequence[T]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def item(self, place: int) -> T:
        return self.items[self.numbers[place]]


@dataclass(frozen=True)
class Checked(Lazy[Any]):
    """Records whose fields are texts, wherever they come from; another is an error that says which record it is."""

    records: Sequence[Any]
    fields: tuple[str, ...]
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def item(self, place: int) -> Any:
        record, wanted = self.records[place], ", ".join(self.fields)
        if not isinstance(record, Mapping):
            raise UserError(f"{self.where(place)} is {record!r:.40}; give a dict with {wanted}")
        for field in self.fields:
            if field not in record:
                known = ", ".join(map(str, record)) or "nothing"
                raise UserError(f"{self.where(place)} has no {field!r}, but {known}; the task reads {wanted}")
            check_text(record[field], field, partial(self.where, place), allow_empty=True)
        return record

    def where(self, place: int) -> str:
        """The source and the index of a record in it."""
        return f"{self.name}, record {place}"


class Joined(Lazy[T]):
    """Sequences one after another."""

    def __init__(self, parts: Iterable[Sequence[T]]):
        self._parts = tuple(parts)
        self._ends = tuple(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def item(self, place: int) -> T:
        part = bisect_right(self._ends, place)
        return self._parts[part][place - self._ends[part]]  # a negative place, counted from the end of the part
