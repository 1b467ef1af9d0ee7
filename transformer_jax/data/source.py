"""What a set of records is: splits of them by number, wherever they come from. And sequences to build one of."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar, get_args

import numpy as np

from transformer_jax.errors import UserError

Split = Literal["train", "valid", "test"]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SHOWN = 40  # characters of a wrong value in an error


class Record(TypedDict):
    """One example: a source text and its target text."""

    source: str
    target: str


class Document(TypedDict):
    """One example: a text that stands by itself."""

    text: str


class Source(ABC, Generic[T_co]):
    """Where records of one kind come from.

    A source of your own is a frozen dataclass, so that it can be part of a config, with a method `split` that gives the
    records of "train", "valid" or "test", and a method `fields` unless these are source and target. The other methods
    have defaults. A record is a mapping from fields to values, which may be anything that the task can read: texts,
    labels, numbers, lists, arrays.

        @dataclass(frozen=True)
        class Reviews(Source):
            folder: Path

            def split(self, name):
                paths = sorted((self.folder / name).glob("*.txt"))
                return [{"text": path.read_text(), "label": path.stem.split("_")[1]} for path in paths]

            def fields(self):
                return ("text", "label")

    A split is a sequence: it has a length, and an index always gives the same record, in every process. A list will do.
    What is too large for one is a `Lazy`, which reads a record when it is asked for. An empty split is allowed for
    valid and test. `UserError` is for what the user can fix; commands print it in one line.
    """

    @abstractmethod
    def split(self, name: Split) -> Sequence[T_co]:
        """The records of a split."""

    def fields(self) -> tuple[str, ...]:
        """The fields of a record: source and target unless a source says otherwise."""
        return ("source", "target")

    def files(self) -> Sequence[Path]:
        """The files that train is read from, if any: a run that is resumed notices when they have changed."""
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
        raise UserError(f"{where()} has {shown(text)} as {field!r}; give a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON, for one, can write half of a surrogate pair
            raise UserError(f"{where()} has {text[error.start]!a} in {field!r}, which is not a character") from error
    if not allow_empty and not text.strip():
        raise UserError(
            f"{where()} has an empty {field}; remove the record, or set allow_empty=True to keep such records"
        )
    return text


def check_strings(record: dict[str, Any], where: Callable[[], str], *, allow_empty: bool) -> dict[str, Any]:
    """A record, of which those values that are strings are texts."""
    for field, value in record.items():
        if isinstance(value, str):
            check_text(value, field, where, allow_empty=allow_empty)
    return record


def shown(value: Any) -> str:
    """The beginning of a value, for errors."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def first_line(error: Exception) -> str:
    """What an error of a library says first; the lines after it are for those who wrote the library."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    @abstractmethod
    def item(self, index: int) -> T:
        """The item at an index from 0 to the length."""

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]  # a range has the rules of a list: negative indices, slices, IndexError
        return self.item(chosen) if isinstance(chosen, int) else [self.item(number) for number in chosen]


@dataclass(frozen=True)
class Chosen(Lazy[T]):
    """The items of another sequence that have these indices."""

    items: Sequence[T]
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int) -> T:
        return self.items[self.indices[index]]

    def where(self, index: int) -> str | None:
        """Where the other sequence has the item from, if it says so."""
        return where_is(self.items, self.indices[index])


@dataclass(frozen=True)
class FirstRecords(Source[T]):
    """The first `count` records of each split of another source."""

    source: Source[T]
    count: int

    def split(self, name: Split) -> Sequence[T]:
        """The first records of a split."""
        records = self.source.split(name)
        return Chosen(records, range(min(len(records), self.count)))

    def fields(self) -> tuple[str, ...]:
        """Those of the other source."""
        return self.source.fields()

    def tags(self) -> tuple[str, ...]:
        """Those of the other source."""
        return self.source.tags()


@dataclass(frozen=True)
class Checked(Lazy[Any]):
    """Records as a task reads them: one without a field, or without text where it must be, is an error that names it.

    Args:
        records: of a split.
        fields: that every record must have.
        text_fields: those of the fields that must be texts.
        name: of the source and the split, for errors.
        word_fields: those of the fields that must be the words of a text: a list of them, or the text.
    """

    records: Sequence[Any]
    fields: tuple[str, ...]
    text_fields: tuple[str, ...]
    name: str
    word_fields: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def item(self, index: int) -> Any:
        record, wanted = self.records[index], ", ".join(self.fields)
        if not isinstance(record, Mapping):
            raise UserError(f"{self.where(index)} is {shown(record)}; give a dict with {wanted}")
        for field in self.fields:
            if field not in record:
                known = ", ".join(map(str, record)) or "nothing"
                raise UserError(f"{self.where(index)} has no {field!r}, but {known}; the task reads {wanted}")
        for field in self.text_fields:
            check_text(record[field], field, partial(self.where, index), allow_empty=True)
        for field in self.word_fields:
            value = record[field]
            for word in value if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else (value,):
                check_text(word, field, partial(self.where, index), allow_empty=True)
        return record

    def where(self, index: int) -> str:
        """The source and the index of a record in it, and the file and line where these are known."""
        found = where_is(self.records, index)
        return f"{self.name}, record {index}" + (f" ({found})" if found else "")


def where_is(items: Sequence[Any], index: int) -> str | None:
    """What a sequence says of where it has an item from; None where it says nothing."""
    where = getattr(items, "where", None)
    return None if where is None else where(index)


class Joined(Lazy[T]):
    """Sequences one after another."""

    def __init__(self, sequences: Iterable[Sequence[T]]):
        self._sequences = tuple(sequences)
        self._ends = tuple(accumulate(map(len, self._sequences)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def item(self, index: int) -> T:
        number = bisect_right(self._ends, index)
        return self._sequences[number][index - self._ends[number]]  # negative: counted from the end of the sequence
