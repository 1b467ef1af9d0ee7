"""Records in files: two of text that correspond line by line, or one table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from transformer_jax.data.csv_records import CsvRecords
from transformer_jax.data.held_out import split_indices
from transformer_jax.data.lines import as_paths
from transformer_jax.data.parquet import Parquet
from transformer_jax.data.source import Chosen, Source, Split, check_split
from transformer_jax.data.tables import Objects, TabLines, open_pair, open_table
from transformer_jax.errors import UserError

TSV, CSV, JSONL, PARQUET = (".tsv", ".tab"), (".csv",), (".jsonl", ".ndjson"), (".parquet",)
TABLES = f"{TSV[0]}, {CSV[0]}, {JSONL[0]} or {PARQUET[0]}"


@dataclass(frozen=True)
class Files(Source[Any]):
    """Records in files of your own."""

    train: tuple[Path, ...] = ()
    """Training data: two text files that correspond line by line, or one .tsv, .csv, .jsonl or .parquet file."""
    valid: tuple[Path, ...] = ()
    """Files to evaluate on during the training, in any of the formats of the training data."""
    test: tuple[Path, ...] = ()
    """Files to evaluate the trained model on, in any of the formats of the training data."""
    columns: dict[str, str] = field(default_factory=lambda: {"source": "", "target": ""}, hash=False)
    """Column of each field of a record: its number from 0 or its name in the first line of a .tsv or .csv file, or a
    field of a .jsonl or .parquet file, with dots into nested objects. Left empty, it is the column of the same name,
    and in a .tsv or .csv file whose first line does not have these names, column 0, 1 and so on."""
    held_out: int = 1000
    """Number of training records, spread over all of them, that are held out to evaluate on where there are no valid
    files, and as many more where there are no test files either; at most one record in twenty for each."""
    allow_empty: bool = False
    """Keep records of which a text is empty; otherwise they are an error that names file and line."""

    def __post_init__(self) -> None:
        for name in get_args(Split):
            object.__setattr__(self, name, as_paths(getattr(self, name)))
            if getattr(self, name):
                self._check_paths(name)
        columns = self.columns or {"source": "", "target": ""}
        # A column may be given as a number.
        object.__setattr__(self, "columns", {str(name): str(column) for name, column in columns.items()})
        if self.held_out < 0:
            raise UserError(f"held_out={self.held_out} is negative; give 0 or more records")

    def split(self, name: Split) -> Sequence[Any]:
        """The records of "train", "valid" or "test", each read when it is asked for."""
        check_split(name)
        if not self.train and not getattr(self, name):
            raise UserError(f"there are no {name} files; set data.{name} to two text files, or to one {TABLES} file")
        paths = getattr(self, name)
        if self.valid or not self.train or (name == "test" and paths):
            return self._open(paths) if paths else ()
        records = self._open(self.train)
        return Chosen(records, split_indices(name, len(records), self.held_out, with_test=not self.test))

    def fields(self) -> tuple[str, ...]:
        """The fields that have columns."""
        return tuple(self.columns)

    def files(self) -> Sequence[Path]:
        """The files of train."""
        return self.train

    def _open(self, paths: tuple[Path, ...]) -> Sequence[Any]:
        columns = self.columns
        if len(paths) == 2:
            return open_pair(paths, columns, allow_empty=self.allow_empty)
        (path,) = paths
        suffix = path.suffix.lower()
        if suffix in TSV + CSV:
            lines = TabLines(path) if suffix in TSV else CsvRecords(path)
            return open_table(lines, columns, allow_empty=self.allow_empty)
        open_objects = Objects if suffix in JSONL else Parquet
        return open_objects(path, {name: column or name for name, column in columns.items()}, self.allow_empty)

    def _check_paths(self, name: Split) -> None:
        paths = getattr(self, name)
        tables = [path for path in paths if path.suffix.lower() in TSV + CSV + JSONL + PARQUET]
        if (len(paths), len(tables)) not in ((2, 0), (1, 1)):
            raise UserError(
                f"{name} is {', '.join(map(str, paths))}; give two text files that correspond line by line, or one "
                f"{TABLES} file"
            )
