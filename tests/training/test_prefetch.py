"""Worker processes that make batches end with the training that started them."""

import multiprocessing
import signal
import subprocess
import sys
import textwrap

import pytest

READING = """
    import sys, time
    from transformer_jax.data import Batches, BatchingConfig, Rows, Store
    from transformer_jax.data.columns import Column
    from transformer_jax.training.prefetch import ahead_of_time

    if __name__ == "__main__":
        rows = Rows(Store.of([{"text": [1, 2, 3]}] * 64, {"text": Column()}), BatchingConfig(rows=2))
        batches = ahead_of_time(Batches(rows), 0, 10**9, workers=2)
        for _ in range(6):
            next(batches)
        print("reading", flush=True)
        time.sleep(600)
"""

WAITING = """
    import multiprocessing, os, sys, time
    from transformer_jax.training.prefetch import end_with_parent

    def wait():
        end_with_parent(0, 1)
        print("waiting", flush=True)
        while True:
            time.sleep(0.01)

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        for _ in range(2):
            context.Process(target=wait).start()
        time.sleep(600)
"""


def killed(tmp_path, script, *arguments, ready):
    """Start a script, kill it when it has written these lines, and wait for the end of its output.

    Every process that it has started writes to the same pipe, which ends when none of them is left.
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen([sys.executable, path, *arguments], stdout=subprocess.PIPE, text=True)
    for line in ready:
        assert process.stdout.readline().strip() == line
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=15)
    assert process.returncode == -signal.SIGKILL


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    killed(tmp_path, READING, ready=["reading"])


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_worker_ends_with_its_parent_however_it_was_started(tmp_path, method):
    killed(tmp_path, WAITING, method, ready=["waiting", "waiting"])
