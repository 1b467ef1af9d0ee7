"""Records from TensorFlow Datasets without TensorFlow: array_record as it is, tfrecord converted once."""

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.data.source import Lazy, Source, Split, check_text, first_line
from transformer_jax.data.tfrecord import add_array_record
from transformer_jax.errors import UserError

CLASS = re.compile(r'"python_?[cC]lass_?[nN]ame"\s*:\s*"([^"]*)"')
"""The class of a feature, by either spelling of the field."""
INSTALL = 'pip install "transformer_jax[tfds]"'


@dataclass(frozen=True)
class Tfds(Source[Any]):
    """A set of TensorFlow Datasets, such as wmt14_translate/de-en, or your own, prepared by it."""

    name: str
    """Name of the set in TFDS, with its configuration and its version where it has several: wmt14_translate/de-en."""
    features: dict[str, str]
    """Fields of a record, each with its feature in the set: source en target de for translation, text text for a
    language model, text text label label for classification, where labels become their names."""
    data_dir: Path | None = None
    """Folder of prepared sets; the default is the one that TFDS uses."""
    train_split: str = "train"
    """Split of the set to train on; a slice of one, such as train[:90%], is a split too."""
    valid_split: str = "validation"
    """Split of the set, or slice of one, to evaluate on during the training."""
    test_split: str = "test"
    """Split of the set, or slice of one, to evaluate the trained model on."""
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
            (str(shard.filename), shard.skip, shard.examples_in_shard - shard.skip if shard.take == -1 else shard.take)
            for shard in builder.info.splits[split].file_instructions
        )
        features = {field: (name, builder.info.features[name]) for field, name in self.features.items()}
        return _Records(records, features, f"{self.name}, {split}", shards, self.allow_empty)

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
    def _folder(self) -> Path | None:
        return Path(self.data_dir).expanduser() if self.data_dir else None

    def _prepared(self) -> Any:
        """TFDS's builder of what is in data_dir, from the files alone; None where there are none."""
        from tensorflow_datasets.core import DatasetNotFoundError
        from tensorflow_datasets.core.read_only_builder import builder_from_files

        self._check_classes()
        try:
            return builder_from_files(self.name, data_dir=self._folder)
        except DatasetNotFoundError:
            return None
        except Exception as error:  # a name that is none, two folders that hold the set, unreadable files
            folder = self._folder or "TFDS's data_dir"
            raise UserError(f"{self.name} cannot be read from {folder}: {first_line(error)}") from error

    def _check_classes(self) -> None:
        """Raise if files of the set name classes of a module that TFDS would import to read them.

        A run's config may say where the set is, and somebody else may have written both.
        """
        import tensorflow_datasets as tfds

        folder = self._folder or Path(tfds.core.constants.DATA_DIR).expanduser()
        for path in (folder / self.name.split("/")[0].split(":")[0]).rglob("features.json"):
            for name in CLASS.findall(path.read_text(encoding="utf-8", errors="replace")):
                module = name.rpartition(".")[0]
                if module.split(".")[0] != "tensorflow_datasets" and module not in sys.modules:
                    raise UserError(
                        f"{path} names the class {name}, and reading it would run the module {module}; import that "
                        "module in your config if you trust it"
                    )

    def _downloaded(self) -> Any:
        import tensorflow_datasets as tfds

        if not self.download:
            where = f", data_dir={str(self._folder)!r}" if self._folder else ""
            code = f"tfds.builder({self.name!r}{where}, file_format='array_record').download_and_prepare()"
            raise UserError(
                f"{self.name} cannot be read from {self._folder or tfds.core.constants.DATA_DIR}: it is not there; "
                f"set download=True, or prepare it with "
                f'python -c "import tensorflow_datasets as tfds; {code}"; both need {INSTALL}'
            )
        try:
            builder = tfds.builder(self.name, data_dir=self._folder, file_format="array_record")
            with redirect_stdout(sys.stderr):
                builder.download_and_prepare()
        except Exception as error:  # TFDS, the network and the code of the set each raise their own
            advice = "" if find_spec("tensorflow") else f"; most sets need TensorFlow to be prepared: {INSTALL}"
            raise UserError(f"{self.name} cannot be fetched and prepared: {first_line(error)}{advice}") from error
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
        for field, name in self.features.items():
            if name not in found or hasattr(found[name], "items"):
                known = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in found.items())
                problem = "is a group of features" if name in found else "is not a feature"
                raise UserError(f"features[{field!r}]={name!r} {problem} of {self.name}; its features are {known}")

    def _check_split(self, field: str, splits: Any) -> None:
        split = getattr(self, field)
        try:
            found = splits[split].num_examples
        except (KeyError, ValueError):  # unknown, or a slice of nothing
            found = 0
        if not found:
            raise UserError(f"{field}={split!r} has no examples in {self.name}; its splits are {', '.join(splits)}")


@dataclass(frozen=True)
class _Records(Lazy[dict[str, Any]]):
    records: Any
    features: dict[str, tuple[str, Any]]
    """The name and the type of the feature of each field."""
    name: str
    """The set and the split, for errors,"""
    shards: tuple[tuple[str, int, int], ...]
    """and its files: the path of each, the first record that is read of it, and how many are."""
    allow_empty: bool

    def __len__(self) -> int:
        return len(self.records)

    def item(self, index: int) -> dict[str, Any]:
        try:
            record = self.records[index]
        except Exception as error:  # array_record and the parser of examples each raise their own
            raise UserError(
                f"{self.where(index)} cannot be read: {first_line(error)}; copy or prepare the set again"
            ) from error
        return {
            field: self._value(record[name], feature, field, name, index)
            for field, (name, feature) in self.features.items()
        }

    def where(self, index: int) -> str:
        """The set, the split and the record, and which file that is in."""
        number = index
        for path, first, count in self.shards:
            if number < count:
                return f"{self.name}, record {index} ({path}, record {first + number}, counted from 0)"
            number -= count
        raise IndexError(index)

    def _value(self, value: Any, feature: Any, field: str, name: str, index: int) -> Any:
        """A value of a feature: a text as a string, a label as its name, all else as it is.

        A label of -1, which means that there is none, is None.
        """
        if isinstance(value, bytes):
            return self._text(value, field, name, index)
        inner = getattr(feature, "feature", feature)  # of a sequence
        if np.ndim(value) and (hasattr(inner, "int2str") or np.asarray(value).dtype.kind in "OS"):
            return [self._value(item, inner, field, name, index) for item in value]
        if hasattr(feature, "int2str"):
            return feature.int2str(int(value)) if value >= 0 else None
        return value

    def _text(self, data: bytes, field: str, name: str, index: int) -> str:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(index)} has byte {error.start + 1} of {name!r}, {data[error.start]:#04x}, that is not "
                "UTF-8; prepare the set again as UTF-8"
            ) from error
        return check_text(text, field, partial(self.where, index), allow_empty=self.allow_empty)
