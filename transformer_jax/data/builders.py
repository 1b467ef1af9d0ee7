"""The embedded data set as a builder of TensorFlow Datasets, prepared without TensorFlow and without a network.

Importing this module registers the builder: `tfds.builder("tj_dates")` finds it then.
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
from transformer_jax.data.source import Record, Split
from transformer_jax.data.tfds import Tfds


@dataclass(eq=False)
class DatesConfig(tfds.core.BuilderConfig):
    """Which dates to prepare."""

    dates: Dates = Dates()


@cache  # TFDS wants a configuration of one name to be one object
def _config(dates: Dates) -> DatesConfig:
    digest = hashlib.blake2b(repr(dates).encode(), digest_size=4).hexdigest()
    return DatesConfig(name="-".join((*dates.languages, digest)), dates=dates)


class TjDates(tfds.core.GeneratorBasedBuilder):
    """`Dates` as TFDS prepares it: its records in their order, as text features `source` and `target`."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS: ClassVar = [_config(Dates())]

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"source": tfds.features.Text(), "target": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, description=Dates.__doc__, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Record]]]:
        splits = {name: self.builder_config.dates.split(name) for name in get_args(Split)}
        return {name: self._generate_examples(split) for name, split in splits.items() if split}  # TFDS has none empty

    def _generate_examples(self, split: Sequence[Record]) -> Iterator[tuple[int, Record]]:
        yield from enumerate(split)


def prepare(dates: Dates, data_dir: Path) -> Tfds:
    """Write a set to data_dir as array_record, unless it is there already; the source that reads it back."""
    config = _config(dates)
    with _quiet():
        TjDates(config=config, data_dir=data_dir, file_format="array_record").download_and_prepare()
    return Tfds(f"{TjDates.name}/{config.name}", "source", "target", data_dir, valid_split="valid")


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
