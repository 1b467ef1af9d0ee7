"""Records from the `datasets` library of Hugging Face: a folder that it saved, or a set of the hub."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformer_jax.data.held_out import split_indices
from transformer_jax.data.parquet import INSTALL
from transformer_jax.data.source import Chosen, Lazy, Source, Split, check_split, check_strings, first_line
from transformer_jax.data.tables import nested_value, outermost
from transformer_jax.errors import UserError

USUAL = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}
"""What sets call their splits."""


@dataclass(frozen=True)
class Datasets(Source[Any]):
    """A set that the `datasets` library of Hugging Face reads, by its name on the hub or from a folder."""

    path: str
    """Folder that `save_to_disk` made, or name of a set on the hub, such as stanfordnlp/imdb."""
    name: str | None = None
    """Configuration of a set on the hub that has several, such as de-en."""
    columns: dict[str, str] = field(default_factory=dict, hash=False)
    """Fields of a record, each with its column in the set (text review label stars), with dots into nested ones (source
    translation.en); the default is every column under its own name."""
    train_split: str | None = None
    """Split of the set to train on; the default is train."""
    valid_split: str | None = None
    """Split of the set to evaluate on during the training; the default is validation, valid or dev, and if the set has
    none of these, records of the training split are held out."""
    test_split: str | None = None
    """Split of the set to evaluate the trained model on; the default is test, if the set has one."""
    held_out: int = 1000
    """Number of training records that are held out to evaluate on where the set has no validation split, and as many
    more where it has no test split either; at most one record in twenty for each."""
    download: bool = False
    """Fetch the set from the hub if it is not in the cache; otherwise nothing is asked of the network."""
    allow_empty: bool = False
    """Keep records of which a text is empty; otherwise they are an error that names them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(self.path))
        object.__setattr__(self, "columns", {str(name): str(column) for name, column in self.columns.items()})
        if self.held_out < 0:
            raise UserError(f"held_out={self.held_out} is negative; give 0 or more records")

    def split(self, name: Split) -> Sequence[Any]:
        """The records of "train", "valid" or "test", each read when it is asked for."""
        check_split(name)
        found = self._splits
        chosen = {split: self._split_name(split, found) for split in ("train", "valid", "test")}
        if chosen["valid"] is not None or (name == "test" and chosen["test"] is not None):
            return () if chosen[name] is None else self._open(found, chosen[name])
        records = self._open(found, chosen["train"])
        indices = split_indices(name, len(records), self.held_out, with_test=chosen["test"] is None)
        return Chosen(records, indices)

    def fields(self) -> tuple[str, ...]:
        """The fields that have columns, or all columns of the set."""
        if self.columns:
            return tuple(self.columns)
        found = self._splits
        return tuple(found[self._split_name("train", found)].column_names)

    def files(self) -> Sequence[Path]:
        """The files of the training split."""
        found = self._splits
        return [Path(file["filename"]) for file in found[self._split_name("train", found)].cache_files]

    @cached_property
    def _splits(self) -> dict[str, Any]:
        """The splits of the set."""
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise UserError(f"{self.path} needs the datasets library to be read: {INSTALL}") from error

        if Path(self.path).expanduser().exists():
            try:
                with _offline():
                    found = datasets.load_from_disk(str(Path(self.path).expanduser()))
            except Exception as error:  # the library, pyarrow and the file system each raise their own
                raise UserError(
                    f"{self.path} cannot be read as a folder that save_to_disk made: {first_line(error)}; use "
                    "data.Files for .csv, .jsonl or .parquet files"
                ) from error
            return found if isinstance(found, datasets.DatasetDict) else {"train": found}
        try:
            if self.download:
                return datasets.load_dataset(self.path, self.name)
            with _offline():
                return datasets.load_dataset(self.path, self.name)
        except Exception as error:  # as above, and the network
            advice = "" if self.download else "; it is no folder and not in the cache: add --data.download to fetch it"
            raise UserError(f"{self.path} cannot be loaded: {first_line(error)}{advice}") from error

    def _split_name(self, split: Split, found: dict[str, Any]) -> Any:
        """The set's own name of a split; None where it has none."""
        given = getattr(self, f"{split}_split")
        name = given or next((usual for usual in USUAL[split] if usual in found), None)
        if (given and given not in found) or (split == "train" and name is None):
            setting = f"{split}_split={given!r} is not a split of" if given else "there is no split 'train' in"
            raise UserError(f"{setting} {self.path}; its splits are {', '.join(found)}; set data.{split}_split to one")
        return name

    def _open(self, found: dict[str, Any], split: str) -> "_Records":
        rows = found[split]
        columns = self.columns or {name: name for name in rows.column_names}
        for name, column in columns.items():
            if outermost(column, rows.column_names) not in rows.column_names:
                known = ", ".join(rows.column_names)
                raise UserError(f"columns[{name!r}]={column!r} is not a column of {self.path}; its columns are {known}")
        needed = list(dict.fromkeys(outermost(column, rows.column_names) for column in columns.values()))
        return _Records(rows.select_columns(needed), columns, f"{self.path}, {split}", self.allow_empty)


@dataclass(frozen=True)
class _Records(Lazy[dict[str, Any]]):
    rows: Any
    columns: dict[str, str]
    name: str
    """The set and the split, for errors."""
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> dict[str, Any]:
        where = partial(self.where, index)
        value = {name: _named(item, self.rows.features[name]) for name, item in self.rows[index].items()}
        record = {field: nested_value(value, column, where) for field, column in self.columns.items()}
        return check_strings(record, where, allow_empty=self.allow_empty)

    def where(self, index: int) -> str:
        """The set, the split and the record."""
        return f"{self.name}, record {index}, counted from 0"


def _named(value: Any, feature: Any) -> Any:
    """A value in which the numbers of labels are their names; -1, which means that there is no label, is None."""
    names = getattr(feature, "names", None)
    if names is not None:
        return None if value is None or value < 0 else names[value]
    if isinstance(feature, dict) and isinstance(value, dict):
        return {name: _named(item, feature[name]) for name, item in value.items()}
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_named(item, inner) for item in value]
    return value


@contextmanager
def _offline() -> Iterator[None]:
    """Without the network: both libraries read their setting when they are imported, and look at it in every call."""
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, setting in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = setting
