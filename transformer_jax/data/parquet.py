"""The records of a Parquet file by number, one row group in memory at a time."""

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformer_jax.data.source import Lazy, check_strings, first_line
from transformer_jax.data.tables import nested_value, outermost
from transformer_jax.errors import UserError

INSTALL = 'pip install "transformer_jax[datasets]"'


class Parquet(Lazy[dict[str, Any]]):
    """The records of a Parquet file, of which only the columns that are asked for are read.

    The row group of the last record is kept: records that are read in order cost little, in any other order much.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], allow_empty: bool):
        self._path, self._columns, self._allow_empty = path, dict(columns), allow_empty
        self._file = _open(path)
        names = self._file.schema_arrow.names
        for field, column in columns.items():
            if outermost(column, names) not in names:
                raise UserError(f"{path} has no column {column!r} for {field}; its columns are {', '.join(names)}")
        self._needed = list(dict.fromkeys(outermost(column, names) for column in columns.values()))
        metadata = self._file.metadata
        self._ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        self._group: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def item(self, index: int) -> dict[str, Any]:
        where = partial(self.where, index)
        number = bisect_right(self._ends, index)
        kept = self._group  # read once: other threads may ask for another group
        if kept[0] != number:
            try:
                kept = self._group = (number, self._file.read_row_group(number, columns=self._needed))
            except Exception as error:  # pyarrow raises its own, and OSError
                raise UserError(f"{where()} cannot be read: {first_line(error)}") from error
        row = index - self._ends[number]  # negative: counted from the end of the group
        value = {name: kept[1].column(name)[row].as_py() for name in self._needed}
        record = {field: nested_value(value, column, where) for field, column in self._columns.items()}
        return check_strings(record, where, allow_empty=self._allow_empty)

    def where(self, index: int) -> str:
        """The file and the record."""
        return f"{self._path}, record {index}, counted from 0"

    def __reduce__(self) -> tuple[Any, ...]:
        return Parquet, (self._path, self._columns, self._allow_empty)


def _open(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs pyarrow to be read: {INSTALL}") from error
    if not path.is_file():
        raise UserError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; give a Parquet file")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
