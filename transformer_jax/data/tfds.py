"""Text from TensorFlow Datasets without TensorFlow: array_record as it is, tfrecord converted once."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.data.source import Lazy, Source, Split, check_text
from transformer_jax.data.tfrecord import add_array_record
from transformer_jax.errors import UserError

INSTALL = 'pip install "transformer_jax[tfds]"'


@dataclass(frozen=True)
class Tfds(Source[Any]):
    """A set of TensorFlow Datasets, such as wmt14_translate/de-en, or your own, prepared by it."""

    name: str
    """The set, its configuration and its version, as TFDS writes them; the last two may be left out."""
    features: dict[str, str]
    """What a record consists of, and from which text features of the set: source en target de for translation, text
    text for a language model."""
    data_dir: Path | None = None
    """Where prepared sets are; TFDS's own place by default."""
    train_split: str = "train"
    """The split to train on; TFDS's slices, such as train[:90%], are splits too."""
    valid_split: str = "validation"
    """The split to follow the training with."""
    test_split: str = "test"
    """The split to judge the result by."""
    download: bool = False
    """Fetch and prepare the set when it is not in data_dir; otherwise nothing is asked of the network."""
    allow_empty: bool = False
    """Keep records of which a text is empty; otherwise they are an error that names file and record."""

    def split(self, name: Split) -> Sequence[Any]:
        """The records of "train", "valid" or "test", each read when it is asked for."""
        builder = self._builder(name)
        split = getattr(self, f"{name}_split")
        records = builder.as_data_source(split)
        for shard in builder.info.splits[split].filepaths:
            if not shard.exists():
                raise UserError(f"{self.name} lacks its file {shard}; copy or prepare the set again")
        shards = tuple(
            (str(part.filename), part.skip, part.examples_in_shard - part.skip if part.take == -1 else part.take)
            for part in builder.info.splits[split].file_instructions
        )
        return _Texts(records, self.features, f"{self.name}, {split}", shards, self.allow_empty)

    def fields(self) -> tuple[str, ...]:
        """What the features are called here."""
        return tuple(self.features)

    def files(self) -> Sequence[Path]:
        """The files of the train split."""
        return [Path(path) for path in self._builder("train").info.splits[self.train_split].filepaths]

    def _builder(self, name: Split) -> Any:
        """TFDS's builder of files that can be read in any order, with the features and the split that are asked for."""
        from tensorflow_datasets.core import FileFormat  # slow to import, and only needed here

        builder = self._prepared() or self._downloaded()
        self._check_features(dict(builder.info.features.items()))
        self._check_split(f"{name}_split", builder.info.splits)
        if not builder.info.available_file_formats() & FileFormat.with_random_access():
            builder = self._converted(builder)
        return builder

    @property
    def _place(self) -> Path | None:
        return Path(self.data_dir).expanduser() if self.data_dir else None

    def _prepared(self) -> Any:
        """TFDS's builder of what is in data_dir, from the files alone; None where there are none."""
        from tensorflow_datasets.core import DatasetNotFoundError
        from tensorflow_datasets.core.read_only_builder import builder_from_files

        try:
            return builder_from_files(self.name, data_dir=self._place)
        except DatasetNotFoundError:
            return None
        except Exception as error:  # a name that is none, two places that hold the set, unreadable files
            place = self._place or "TFDS's data_dir"
            raise UserError(f"{self.name} cannot be read from {place}: {_first_line(error)}") from error

    def _downloaded(self) -> Any:
        import tensorflow_datasets as tfds

        if not self.download:
            where = f", data_dir={str(self._place)!r}" if self._place else ""
            code = f"tfds.builder({self.name!r}{where}, file_format='array_record').download_and_prepare()"
            raise UserError(
                f"{self.name} cannot be read from {self._place or tfds.core.constants.DATA_DIR}: it is not there; "
                f"set download=True, or prepare it with "
                f'python -c "import tensorflow_datasets as tfds; {code}"; both need {INSTALL}'
            )
        try:
            builder = tfds.builder(self.name, data_dir=self._place, file_format="array_record")
            with redirect_stdout(sys.stderr):
                builder.download_and_prepare()
        except Exception as error:  # TFDS, the network and the code of the set each raise their own
            advice = "" if find_spec("tensorflow") else f"; most sets need TensorFlow to be prepared: {INSTALL}"
            raise UserError(f"{self.name} cannot be fetched and prepared: {_first_line(error)}{advice}") from error
        return tfds.builder_from_directory(builder.data_dir)

    def _converted(self, builder: Any) -> Any:
        import tensorflow_datasets as tfds

        folder, found = Path(builder.data_dir), builder.info.file_format
        if found is not tfds.core.FileFormat.TFRECORD:
            raise UserError(
                f"{self.name} is in {folder} as {found.value}; prepare it as array_record in another data_dir"
            )
        print(f"converting {self.name} from tfrecord to array_record, once, in {folder}", file=sys.stderr)
        try:
            add_array_record(folder, builder.info.splits)
        except OSError as error:
            raise UserError(f"{self.name} cannot be converted from tfrecord to array_record: {error}") from error
        return tfds.builder_from_directory(folder)

    def _check_features(self, found: dict[str, Any]) -> None:
        texts = {name for name, feature in found.items() if (feature.shape, feature.np_dtype) == ((), np.object_)}
        for field, name in self.features.items():
            if name not in texts:
                known = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in found.items())
                raise UserError(
                    f"features[{field!r}]={name!r} is no text feature of {self.name}; its features are {known}"
                )

    def _check_split(self, field: str, splits: Any) -> None:
        split = getattr(self, field)
        try:
            found = splits[split].num_examples
        except (KeyError, ValueError):  # unknown, or a slice of nothing
            found = 0
        if not found:
            raise UserError(f"{field}={split!r} has no examples in {self.name}; its splits are {', '.join(splits)}")


@dataclass(frozen=True)
class _Texts(Lazy[dict[str, str]]):
    records: Any
    features: dict[str, str]
    name: str
    """The set and the split, for errors,"""
    shards: tuple[tuple[str, int, int], ...]
    """and its files: the path of each, the first record that is read of it, and how many are."""
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.records)

    def item(self, place: int) -> dict[str, str]:
        try:
            record = self.records[place]
        except Exception as error:  # array_record and the parser of examples each raise their own
            raise UserError(
                f"{self.where(place)} cannot be read: {_first_line(error)}; copy or prepare the set again"
            ) from error
        return {field: self._text(record[name], field, name, place) for field, name in self.features.items()}

    def where(self, place: int) -> str:
        """The set, the split and the record, and which file that is in."""
        number = place
        for path, first, count in self.shards:
            if number < count:
                return f"{self.name}, record {place} ({path}, record {first + number}, counted from 0)"
            number -= count
        raise IndexError(place)

    def _text(self, data: bytes, field: str, name: str, place: int) -> str:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(place)} has byte {error.start + 1} of {name!r}, {data[error.start]:#04x}, that is not "
                "UTF-8; prepare the set again as UTF-8"
            ) from error
        return check_text(text, field, partial(self.where, place), allow_empty=self.allow_empty)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
