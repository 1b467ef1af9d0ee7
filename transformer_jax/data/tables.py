"""Records in files of text: two that correspond line by line, and tables of tabs, of commas and of JSON objects."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformer_jax.data.csv_records import CsvRecords
from transformer_jax.data.lines import Lines
from transformer_jax.data.source import Lazy, check_strings, check_text, shown
from transformer_jax.errors import UserError


def open_pair(paths: Sequence[Path], columns: Mapping[str, str], *, allow_empty: bool) -> "_Pair":
    """The records of two files that correspond line by line: one field of each, in the order of `columns`."""
    if len(columns) != 2:
        raise UserError(
            f"columns names {', '.join(columns)}, but {paths[0]} and {paths[1]} are two files of one field each"
        )
    # Numbers are those of the files; any other name of a column says nothing of a file without columns.
    numbered = sorted(columns.values()) == ["0", "1"]
    names = tuple(sorted(columns, key=lambda name: columns[name]) if numbered else columns)
    first, second = map(Lines, paths)
    if len(first) != len(second):
        shorter, longer = sorted((first, second), key=len)
        raise UserError(
            f"{first.path} has {len(first)} lines but {second.path} has {len(second)}, and they must correspond "
            f"line by line; {longer.where(len(shorter))}, is the first without a partner"
        )
    return _Pair(dict(zip(names, (first, second), strict=True)), allow_empty)


@dataclass(frozen=True)
class _Pair(Lazy[dict[str, str]]):
    files: dict[str, Lines]
    """By field."""
    allow_empty: bool

    def __len__(self) -> int:
        return min(map(len, self.files.values()))

    def item(self, index: int) -> dict[str, str]:
        return {
            field: check_text(lines[index], field, partial(lines.where, index), allow_empty=self.allow_empty)
            for field, lines in self.files.items()
        }

    def where(self, index: int) -> str:
        """The files and the line."""
        return " and ".join(lines.where(index) for lines in self.files.values())


class TabLines(Lines):
    """The lines of a file with tabs between columns, in which a quote is a character like any other."""

    separator = "tab"

    def cells(self, index: int) -> list[str]:
        """The columns of a line."""
        return self[index].split("\t")


def open_table(lines: TabLines | CsvRecords, columns: Mapping[str, str], *, allow_empty: bool) -> "_Table":
    """The records of a table. A column that is named, rather than numbered, makes a header of its first record.

    A field without a column is in the one that the first record names so, or else in that of its own number.
    """
    first = lines.cells(0) if len(lines) else []
    unnamed = [field for field, column in columns.items() if not column]
    is_named = all(field in first for field in unnamed)
    if not is_named and any(field in first for field in unnamed):
        missing = next(field for field in unnamed if field not in first)
        raise UserError(
            f"the first line of {lines.path} names {', '.join(first)}, but not {missing}; "
            f"set data.columns.{missing} to one of these"
        )
    columns = {
        field: column or (field if is_named else str(number)) for number, (field, column) in enumerate(columns.items())
    }
    has_header = not all(column.isdecimal() for column in columns.values())
    header = first if has_header else []
    for column in columns.values():
        if not column.isdecimal() and header.count(column) != 1:
            problem = "several columns" if column in header else "no column"
            raise UserError(f"{lines.path} has {problem} {column!r}; its first line has {', '.join(header)}")
    numbers = {field: int(column) if column.isdecimal() else header.index(column) for field, column in columns.items()}
    return _Table(lines, numbers, int(has_header), allow_empty)


@dataclass(frozen=True)
class _Table(Lazy[dict[str, str]]):
    lines: TabLines | CsvRecords
    columns: dict[str, int]
    """The number of the column of each field."""
    first: int
    """The index of the first record: 1 below a header, else 0."""
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.lines) - self.first

    def item(self, index: int) -> dict[str, str]:
        cells = self.lines.cells(self.first + index)
        needed = max(self.columns.values()) + 1
        if len(cells) < needed:
            fields = ", ".join(f"{field} is column {number}" for field, number in self.columns.items())
            raise UserError(
                f"{self.where(index)} has {len(cells)} of the {needed} columns needed ({fields}, counted from 0); "
                f"put a {self.lines.separator} between columns"
            )
        record = {field: cells[number] for field, number in self.columns.items()}
        return check_strings(record, partial(self.where, index), allow_empty=self.allow_empty)

    def where(self, index: int) -> str:
        """The file and the line."""
        return self.lines.where(self.first + index)


class Objects(Lazy[dict[str, Any]]):
    """The records of a file with a JSON object on each line."""

    def __init__(self, path: Path, columns: Mapping[str, str], allow_empty: bool):
        self._lines, self._columns, self._allow_empty = Lines(path), dict(columns), allow_empty

    def __len__(self) -> int:
        return len(self._lines)

    def item(self, index: int) -> dict[str, Any]:
        where = partial(self.where, index)
        try:
            value = json.loads(self._lines[index])
        except json.JSONDecodeError as error:
            raise UserError(f"{where()} is not JSON: {error.msg} at character {error.colno}") from error
        record = {field: nested_value(value, path, where) for field, path in self._columns.items()}
        return check_strings(record, where, allow_empty=self._allow_empty)

    def where(self, index: int) -> str:
        """The file and the line."""
        return self._lines.where(index)


def outermost(path: str, names: Sequence[str]) -> str:
    """Which of the names a path begins with; one that is a name itself may have dots of its own."""
    return path if path in names else path.partition(".")[0]


def nested_value(value: Any, path: str, where: Callable[[], str]) -> Any:
    """What an object has under a name, or under a path of names with dots between them."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for name in path.split("."):
        if not isinstance(value, dict):
            raise UserError(f"{where()} has {shown(value)} where an object with {name!r} was expected")
        if name not in value:
            known = ", ".join(value) or "no fields"
            raise UserError(f"{where()} has no {path!r}: there is no {name!r} among {known}")
        value = value[name]
    return value
