"""The embedded sets as builders of TensorFlow Datasets, prepared without TensorFlow and without a network.

Importing this module registers the builders: `tfds.builder("tj_dates")` and `tfds.builder("tj_text")` find them then.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args

import tensorflow_datasets as tfds
from absl import logging

from transformer_jax.data.dates import Dates
from transformer_jax.data.lines import open_text
from transformer_jax.data.source import Source, Split
from transformer_jax.data.text import Text
from transformer_jax.data.tfds import Tfds


@dataclass(eq=False)
class SourceConfig(tfds.core.BuilderConfig):
    """Which records to prepare."""

    source: Source[Any] = Dates()


def _config(source: Dates | Text) -> SourceConfig:
    """The configuration of a source and of what its files hold now: other content is another set."""
    content = hashlib.blake2b()
    for path in (path for split in get_args(Split) for path in getattr(source, split, ())):
        with open_text(path) as file:
            content.update(hashlib.file_digest(file, "blake2b").digest())
    return _named_config(source, content.hexdigest() if source.files() else "")


@cache  # TFDS wants a configuration of one name to be one object
def _named_config(source: Dates | Text, content: str) -> SourceConfig:
    digest = hashlib.blake2b(f"{source!r}{content}".encode(), digest_size=4).hexdigest()
    words = source.languages if isinstance(source, Dates) else ("documentation" if source == Text() else "files",)
    return SourceConfig(name="-".join((*words, digest)), source=source)


class _Embedded(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """A source as TFDS prepares it: its records in their order, as text features of the same names."""

    VERSION = tfds.core.Version("1.0.0")
    fields: ClassVar[tuple[str, ...]]

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({field: tfds.features.Text() for field in self.fields})
        about = type(self.builder_config.source).__doc__
        return tfds.core.DatasetInfo(builder=self, features=features, description=about, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Any]]]:
        splits = {name: self.builder_config.source.split(name) for name in get_args(Split)}
        return {name: self._generate_examples(split) for name, split in splits.items() if split}  # TFDS has none empty

    def _generate_examples(self, split: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        yield from enumerate(split)


class TjDates(_Embedded):
    """`Dates` as TFDS prepares it, with the features `source` and `target`."""

    fields = ("source", "target")
    BUILDER_CONFIGS: ClassVar = [_config(Dates())]


class TjText(_Embedded):
    """`Text` as TFDS prepares it, with the feature `text`; by default Python's documentation."""

    fields = ("text",)
    BUILDER_CONFIGS: ClassVar = [_config(Text())]


def prepare(source: Dates | Text, data_dir: Path) -> Tfds:
    """Write a set to data_dir as array_record, unless it is there already; the source that reads it back."""
    config, builder = _config(source), TjDates if isinstance(source, Dates) else TjText
    with _quiet():
        builder(config=config, data_dir=data_dir, file_format="array_record").download_and_prepare()
    features = {field: field for field in builder.fields}
    # A line that is a document may be empty.
    return Tfds(f"{builder.name}/{config.name}", features, data_dir, valid_split="valid", allow_empty=True)


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
