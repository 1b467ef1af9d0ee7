"""The batches of a run, made ahead of the step in a thread or in worker processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import grain
import numpy as np
from absl import flags

from transformer_jax.data import Batches


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
