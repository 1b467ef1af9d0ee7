"""The encoded splits of a run: made once, and kept in its workdir, or on this machine if that is in a bucket."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.atomic import atomic
from transformer_jax.data.columns import token_column
from transformer_jax.data.source import Checked, Chosen, Split, where_is
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.tasks import Task
from transformer_jax.training.config import Config
from transformer_jax.training.lock import turn
from transformer_jax.training.progress import watch
from transformer_jax.training.workdir import Workdir

NUM_SAMPLES = 256
PART = 8192  # records that are encoded at once


@dataclass(frozen=True)
class EncodedSplit:
    """The records of a split, and the examples that they became."""

    records: Sequence[Any]
    examples: Store


def records_of(config: Config, split: Split, limit: int | None = None) -> Sequence[Any]:
    """The records of a split, or evenly spaced ones of more than `limit`; each is checked when it is read."""
    task, name = config.task, f"{type(config.data).__name__}, {split}"
    records = Checked(config.data.split(split), task.fields, task.text_fields, name, task.word_fields)
    if limit is None or len(records) <= limit:
        return records
    return Chosen(records, [number * len(records) // limit for number in range(limit)])


def training_examples(workdir: Workdir, config: Config, task: Task) -> Store:
    """The encoded training set: mapped from the workdir, where it is written first if it is not there."""
    records = records_of(config, "train")
    mark, mark_file = fingerprint(records, config.data.files()), workdir.examples_mark
    if mark_file.exists():
        if mark_file.read_text() != mark:
            raise UserError(
                f"the training data are not those that {workdir.path} was begun with; "
                "give another --workdir, or bring the old data back to go on"
            )
    else:
        with atomic(mark_file) as unfinished:
            unfinished.write_text(mark)
    with turn(workdir.examples):
        return _open_or_write(workdir, config, task, records)


def _open_or_write(workdir: Workdir, config: Config, task: Task, records: Sequence[Any]) -> Store:
    if (workdir.examples / "train").exists():
        store = Store.open(workdir.examples / "train")
        if store.columns != task.columns:
            raise UserError(
                f"the columns of {type(task).__name__} are not those that {workdir.path} was begun with; "
                "give another --workdir"
            )
        return store
    if not len(records):
        raise UserError("the train split is empty")
    for split in ("valid", "test"):  # now, rather than at the first evaluation or after the training
        for _ in _encoded(records_of(config, split), task, split):
            pass
    store = Store.write(workdir.examples / "train", _encoded(records, task, "train"), task.columns)
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is not None:
        tokens = token_column(tokenizer.vocab_size, tokenizer.pad_id)
        texts = [store.values[name] for name in store.ends if task.columns[name] == tokens]
        tokenizer.warn_if_unknown(texts, "columns of the training set", share=0.1)
    return store


def validation_examples(workdir: Workdir, config: Config, task: Task) -> EncodedSplit:
    """What is evaluated on during training, encoded once: written to the workdir, and again if the data changed."""
    records = records_of(config, "valid", config.evaluate_examples)
    folder = workdir.examples / "valid"
    path = folder / fingerprint(records, num_samples=len(records))
    with turn(workdir.examples):
        if not path.exists() or Store.open(path).columns != task.columns:
            for old in folder.iterdir() if folder.is_dir() else ():
                _remove_store(old)
            Store.write(path, _encoded(records, task, "valid"), task.columns)
        return EncodedSplit(records, Store.open(path))


def encode_split(config: Config, task: Task, split: Split, limit: int | None = None) -> EncodedSplit:
    """A split in memory."""
    records = records_of(config, split, limit)
    examples = [example for part in _encoded(records, task, split) for example in part]
    return EncodedSplit(records, Store.of(examples, task.columns))


def fingerprint(records: Sequence[Any], files: Sequence[Path] = (), *, num_samples: int = NUM_SAMPLES) -> str:
    """A hash of the number of records, of some of them, evenly spaced, and of all of the files that they are in."""
    step = max(1, len(records) // max(num_samples, 1))
    digest = hashlib.sha256(json.dumps([len(records), step]).encode())
    for index in range(0, len(records), step):
        digest.update(json.dumps(records[index], default=_bytes).encode())
    for path in watch(files, "looking for changes in the training data"):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()[:16]


def _bytes(value: Any) -> str:
    array = np.asarray(value)
    if array.dtype == object:  # whose bytes are addresses
        return repr(value)
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _encoded(records: Sequence[Any], task: Task, split: Split) -> Iterator[Sequence[Any]]:
    starts = range(0, len(records), PART)
    for start in watch(starts, f"encoding the {split} split"):
        indices = range(start, min(start + PART, len(records)))
        try:
            yield task.encode([records[i] for i in indices])
        except ValueError:
            _raise_with_record(records, task, indices)
            raise


def _raise_with_record(records: Sequence[Any], task: Task, indices: Iterable[int]) -> None:
    """Say which record cannot be encoded: a task sees many at once, and not where they come from."""
    for index in indices:
        record = records[index]  # which raises by itself, and says where it is, if it cannot be read
        try:
            task.encode([record])
        except ValueError as error:
            raise UserError(f"{where_is(records, index)}: {error}") from error


def _remove_store(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
