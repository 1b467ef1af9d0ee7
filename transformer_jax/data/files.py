"""Parallel text in files: two that correspond line by line, or one of tab-separated columns or of JSON objects."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from transformer_jax.data.lines import Lines, as_paths
from transformer_jax.data.source import Chosen, Lazy, Record, Source, Split, check_split, check_text
from transformer_jax.errors import UserError

TSV, JSONL = (".tsv", ".tab"), (".jsonl", ".ndjson")
FEWEST = 20  # records of train for each one held out


@dataclass(frozen=True)
class Files(Source[Record]):
    """Parallel text in files of your own."""

    train: tuple[Path, ...] = ()
    """Two files that correspond line by line, source and target; or one .tsv or .jsonl file."""
    valid: tuple[Path, ...] = ()
    """The same, to follow the training with."""
    test: tuple[Path, ...] = ()
    """The same, to judge the result by."""
    source: str = ""
    """Where a .tsv or .jsonl file has the source: a column, as a number from 0 or by the name that the first line gives
    it, or a field, with dots into nested objects (translation.en). Column 0 or the field "source" by default."""
    target: str = ""
    """The same for the target. Column 1 or the field "target" by default."""
    held_out: int = 1000
    """Without valid files, this many records of train are valid instead, and as many more are test unless it has files;
    at most one record in twenty for each."""
    allow_empty: bool = False
    """Keep pairs of which a side is empty; otherwise they are an error that names file and line."""

    def __post_init__(self) -> None:
        for name in get_args(Split):
            object.__setattr__(self, name, as_paths(getattr(self, name)))
            if getattr(self, name):
                _check_paths(name, getattr(self, name))
        for name in ("source", "target"):
            object.__setattr__(self, name, str(getattr(self, name)))  # a column may be given as a number
            if getattr(self, name) and all(len(paths) != 1 for paths in (self.train, self.valid, self.test)):
                raise UserError(
                    f"{name}={getattr(self, name)!r} is a column of a .tsv file or a field of a .jsonl file, and there "
                    "is none; leave it out"
                )
        if self.held_out < 0:
            raise UserError(f"held_out={self.held_out} is negative; give 0 or more records")

    def split(self, name: Split) -> Sequence[Record]:
        """The records of "train", "valid" or "test", each read when it is asked for."""
        check_split(name)
        if not self.train:
            raise UserError("there are no files to train on; set train to two files, or to one .tsv or .jsonl file")
        paths = getattr(self, name)
        if self.valid or (name == "test" and paths):
            return self._open(paths) if paths else ()
        records = self._open(self.train)
        return Chosen(records, _numbers(name, len(records), self.held_out, with_test=not self.test))

    def files(self) -> Sequence[Path]:
        """The files of train."""
        return self.train

    def _open(self, paths: tuple[Path, ...]) -> Sequence[Record]:
        if len(paths) == 2:
            return _open_lines(*map(Lines, paths), allow_empty=self.allow_empty)
        lines = Lines(paths[0])
        if paths[0].suffix.lower() in TSV:
            return _open_columns(lines, self.source or "0", self.target or "1", allow_empty=self.allow_empty)
        return _Objects(lines, self.source or "source", self.target or "target", self.allow_empty)


def _check_paths(name: str, paths: Sequence[Path]) -> None:
    tables = [path for path in paths if path.suffix.lower() in TSV + JSONL]
    if (len(paths), len(tables)) not in ((2, 0), (1, 1)):
        given = ", ".join(map(str, paths)) or "empty"
        raise UserError(
            f"{name} is {given}; give two text files that correspond line by line, or one {TSV[0]} or {JSONL[0]} file"
        )


def _numbers(name: Split, total: int, held_out: int, *, with_test: bool) -> Sequence[int]:
    """The numbers of the records of a split: every so-many-th for valid, as many between these for test."""
    count = min(held_out, total // FEWEST)
    stride = max(FEWEST, total // max(count, 1))
    middle = stride // 2
    if name == "train":
        return _Others(total, count, stride, (0, middle) if with_test else (0,))
    return range(0 if name == "valid" else middle, count * stride, stride)


@dataclass(frozen=True)
class _Others(Lazy[int]):
    """The numbers below `total` without those at `offsets` in each of the first `strides`."""

    total: int
    strides: int
    stride: int
    offsets: tuple[int, ...]

    def __len__(self) -> int:
        return self.total - self.strides * len(self.offsets)

    def item(self, place: int) -> int:
        before, within = divmod(place, self.stride - len(self.offsets))
        if before >= self.strides:
            return place + self.strides * len(self.offsets)
        for offset in self.offsets:  # in order: each that is passed makes the next come sooner
            within += within >= offset
        return before * self.stride + within


def _open_lines(sources: Lines, targets: Lines, *, allow_empty: bool) -> "_Lines":
    if len(sources) != len(targets):
        shorter, longer = sorted((sources, targets), key=len)
        raise UserError(
            f"{sources.path} has {len(sources)} lines but {targets.path} has {len(targets)}, and they must correspond "
            f"line by line; {longer.where(len(shorter))}, is the first without a partner"
        )
    return _Lines(sources, targets, allow_empty)


@dataclass(frozen=True)
class _Lines(Lazy[Record]):
    sources: Lines
    targets: Lines
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.sources)

    def item(self, place: int) -> Record:
        return {
            "source": self._text("source", self.sources, place),
            "target": self._text("target", self.targets, place),
        }

    def _text(self, side: str, lines: Lines, place: int) -> str:
        return check_text(lines[place], side, partial(lines.where, place), allow_empty=self.allow_empty)


def _open_columns(lines: Lines, source: str, target: str, *, allow_empty: bool) -> "_Columns":
    has_header = not (source.isdecimal() and target.isdecimal())
    names = lines[0].split("\t") if has_header else []
    for name in (source, target):
        if not name.isdecimal() and name not in names:
            raise UserError(f"{lines.path} has no column {name!r}; its first line has {', '.join(names)}")
    numbers = [int(name) if name.isdecimal() else names.index(name) for name in (source, target)]
    return _Columns(lines, numbers[0], numbers[1], int(has_header), allow_empty)


@dataclass(frozen=True)
class _Columns(Lazy[Record]):
    lines: Lines
    source: int
    target: int
    first: int
    """The line of the first record: 1 below a header, else 0."""
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.lines) - self.first

    def item(self, place: int) -> Record:
        where = partial(self.lines.where, self.first + place)
        columns = self.lines[self.first + place].split("\t")  # a quote is a character like any other
        needed = max(self.source, self.target) + 1
        if len(columns) < needed:
            raise UserError(
                f"{where()} has {len(columns)} of the {needed} columns needed (source is "
                f"column {self.source}, target column {self.target}, counted from 0); put a tab between columns"
            )
        return {
            "source": check_text(columns[self.source], "source", where, allow_empty=self.allow_empty),
            "target": check_text(columns[self.target], "target", where, allow_empty=self.allow_empty),
        }


@dataclass(frozen=True)
class _Objects(Lazy[Record]):
    lines: Lines
    source: str
    target: str
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.lines)

    def item(self, place: int) -> Record:
        where = partial(self.lines.where, place)
        try:
            value = json.loads(self.lines[place])
        except json.JSONDecodeError as error:
            raise UserError(f"{where()} is not JSON: {error.msg} at character {error.colno}") from error
        return {"source": self._text(value, "source", where), "target": self._text(value, "target", where)}

    def _text(self, value: Any, side: str, where: Callable[[], str]) -> str:
        """The text of a field, with dots into nested objects."""
        field = getattr(self, side)
        for name in field.split("."):
            if not isinstance(value, dict):
                raise UserError(f"{where()} has {_shown(value)} where an object with {name!r} was expected")
            if name not in value:
                known = ", ".join(value) or "no fields"
                raise UserError(f"{where()} has no {field!r}: there is no {name!r} among {known}")
            value = value[name]
        if not isinstance(value, str):
            raise UserError(f"{where()} has {_shown(value)} as {field!r}; give a string")
        return check_text(value, side, where, allow_empty=self.allow_empty)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}…"
