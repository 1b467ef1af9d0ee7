"""Parallel text from TensorFlow Datasets, read from array_record files without TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.data.source import Record, Split
from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Tfds:
    """A translation set of TensorFlow Datasets, such as wmt14_translate/de-en."""

    name: str
    """The set and its configuration."""
    source_language: str
    """The feature to translate from."""
    target_language: str
    """The feature to translate into."""
    data_dir: Path | None = None
    """Where prepared sets are; TFDS's own place by default."""
    train_split: str = "train"
    valid_split: str = "validation"
    test_split: str = "test"

    def split(self, name: Split) -> Sequence[Record]:
        """The pairs of "train", "valid" or "test", each read when it is asked for."""
        import tensorflow_datasets as tfds  # slow to import, and only needed here

        split = {"train": self.train_split, "valid": self.valid_split, "test": self.test_split}[name]
        try:
            builder = tfds.builder(self.name, data_dir=self.data_dir, file_format="array_record")
            pairs = builder.as_data_source(split)
        except Exception as error:
            place = self.data_dir or "TFDS's data_dir"
            raise UserError(
                f"{self.name} cannot be read from {place}: {_first_line(error)}; prepare it there with "
                f"tfds.builder({self.name!r}, file_format='array_record').download_and_prepare()"
            ) from error
        return _Pairs(pairs, self.source_language, self.target_language)

    def tags(self) -> tuple[str, ...]:
        """No text of this set begins with a tag."""
        return ()

    def prompt(self, text: str) -> str:
        """A source is the text itself."""
        return text


@dataclass(frozen=True)
class _Pairs(Sequence[Record]):
    records: Any
    source: str
    target: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        record = self.records[index]
        for language in (self.source, self.target):
            if language not in record:
                raise UserError(f"the set has no {language!r}; its features are {', '.join(record)}")
        return {"source": _text(record[self.source]), "target": _text(record[self.target])}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
