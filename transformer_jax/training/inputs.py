"""What a run reads: the tokenizer and the encoded training set, made once and kept in its workdir, and the batches."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from transformer_jax.atomic import atomic
from transformer_jax.data import Batches, Tokenizer
from transformer_jax.data.source import Checked, Split
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.tasks import Task
from transformer_jax.training.config import Config
from transformer_jax.training.progress import watch
from transformer_jax.training.workdir import Workdir

NUM_SAMPLES = 256
PART = 8192


def fingerprint(records: Sequence[Any], files: Sequence[Path] = ()) -> str:
    """A hash of the number of records, of some of them, evenly spaced, and of all of the files that they are in."""
    step = max(1, len(records) // NUM_SAMPLES)
    sample = [records[i] for i in range(0, len(records), step)]
    digests = [_digest(path) for path in watch(files, "looking for changes in the training data")]
    return hashlib.sha256(json.dumps([len(records), sample, *digests]).encode()).hexdigest()[:16]


def load_or_train_tokenizer(workdir: Workdir, config: Config) -> Tokenizer:
    """The run's tokenizer, which at first is loaded from the file that the config names, or trained."""
    if workdir.tokenizer_file.exists():
        return Tokenizer.load(workdir.tokenizer_file, config.tokenizer)
    if config.tokenizer.path is not None:
        return Tokenizer.load(config.tokenizer.path, config.tokenizer, tags=config.data.tags())
    records = _records(config, "train")
    step = -(-len(records) // config.tokenizer.max_records) or 1
    texts = (
        text
        for number in watch(range(0, len(records), step), "reading records for the tokenizer")
        for text in (records[number][field] for field in config.task.fields)
    )
    return Tokenizer.train(texts, config.tokenizer, tags=config.data.tags())


def load_or_encode(workdir: Workdir, config: Config, task: Task) -> Store:
    """The encoded training set: mapped from the workdir, where it is written first if it is not there."""
    records = _records(config, "train")
    mark, path = fingerprint(records, config.data.files()), workdir.examples
    if workdir.examples_mark.exists():
        if workdir.examples_mark.read_text() != mark:
            raise UserError(
                f"the training data are not those that {workdir.path} was begun with; "
                "give another --workdir, or bring the old data back to go on"
            )
    else:
        with atomic(workdir.examples_mark) as unfinished:
            unfinished.write_text(mark)
    if path.exists():
        return Store.open(path)
    if not len(records):
        raise UserError("the train split is empty")
    for split in ("valid", "test"):  # now, rather than at the first evaluation
        for _ in watch(_records(config, split), f"reading the {split} split"):
            pass
    store = Store.write(path, _encoded(records, task), vocab_size=task.tokenizer.vocab_size)
    task.tokenizer.warn_if_unknown(store.ids.values(), "columns of the training set", share=0.1)
    return store


def ahead_of_time(batches: Batches, first: int, end: int, workers: int) -> Iterator[dict[str, np.ndarray]]:
    """The batches from `first` to `end`, made before they are asked for, in a thread or in worker processes."""
    numbers = grain.MapDataset.range(first, end).map(batches.__getitem__)
    made = numbers.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    if not workers:
        return iter(made)
    flags.FLAGS.mark_as_parsed()  # Grain asks for flags of its own, and the command line has none for it
    made = made.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=8), worker_init_fn=end_with_parent
    )
    # Out of the memory that is shared with the workers, so that it is free again.
    return ({name: array.copy() for name, array in batch.items()} for batch in made)


def end_with_parent(index: int, count: int) -> None:
    """In a worker process: end it as soon as the process that started it is gone, and for no other reason.

    Ctrl-C in a terminal, and the SIGTERM of many schedulers, go to all processes at once. Here they are left to the
    trainer, which still needs batches while it finishes its step and saves.

    The kernel closes the pipe behind `parent_process` when the parent dies, also if that was before this call. Linux's
    PR_SET_PDEATHSIG would do worse: it goes by the thread that started the worker, and Grain's ends early.
    """

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)  # without the clean-up of multiprocessing, which waits for the parent to read what was made

    threading.Thread(target=wait, daemon=True).start()
    with suppress(ValueError):  # not in the main thread: then the signals do not come here
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _records(config: Config, split: Split) -> Sequence[Any]:
    """The records of a split, of which each is checked when it is read, by whatever source it is given."""
    return Checked(config.data.split(split), config.task.fields, f"{type(config.data).__name__}, {split}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _encoded(records: Sequence[Any], task: Task) -> Iterator[Sequence]:
    starts = range(0, len(records), PART)
    for start in watch(starts, "encoding the training set"):
        yield task.encode([records[i] for i in range(start, min(start + PART, len(records)))])
