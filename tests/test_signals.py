"""train.py asked to stop before there is anything to save, and asked twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_commands import TINY
from transformer_jax.commands.train import parse_config
from transformer_jax.training.lock import locked
from transformer_jax.training.workdir import Workdir

ROOT = Path(__file__).parent.parent


def begin(workdir, *flags, **options):
    return subprocess.Popen(
        [sys.executable, "train.py", *TINY, *flags, "--workdir", str(workdir)],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for(path, process):
    deadline = time.monotonic() + 200
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended or hangs"
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "line"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_while_the_tokenizer_is_trained_it_ends_at_once(tmp_path, number, line):
    process = begin(tmp_path / "run", "--data.train-size", "1000000", "--processor.max-records", "1000000")
    wait_for(tmp_path / "run" / "lock", process)
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "", f"{line}\n")
    with locked(tmp_path / "run"):
        Workdir(tmp_path / "run").check(parse_config([*TINY, "--seed", "5"], "train.py"))  # as if nothing had been


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_asked_twice_it_leaves_without_a_word_of_its_threads(tmp_path, pause):
    process = begin(tmp_path / "run", "--steps", "100000", "--evaluate-every", "50000", "--save-every", "2")
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    time.sleep(pause)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    last = err.splitlines()[-1]
    # The first signal may have been enough for a run that saves faster than this.
    assert (process.returncode, last) in [
        (130, "interrupted"),
        (143, "stopped and saved; the same command goes on from here"),
    ]
    assert "Traceback" not in err


def test_two_trainings_in_one_workdir(tmp_path):
    first = begin(tmp_path / "run", "--steps", "100000", "--evaluate-every", "50000", "--save-every", "2")
    wait_for(tmp_path / "run" / "metrics.jsonl", first)
    second = begin(tmp_path / "run", "--steps", "100000", "--evaluate-every", "50000", "--save-every", "2")
    out, err = second.communicate(timeout=200)
    assert (second.returncode, out) == (1, "")
    assert err.startswith(f"error: {tmp_path / 'run'} is in use: process {first.pid} on ") and err.count("\n") == 1
    assert first.poll() is None
    first.kill()
    first.communicate()
    third = begin(tmp_path / "run", "--steps", "100000", "--evaluate-every", "50000", "--save-every", "2")
    third_starts = time.monotonic() + 100
    while "they are compiled" not in third.stderr.readline():
        assert third.poll() is None and time.monotonic() < third_starts
    third.kill()
    third.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_the_workers_to_the_trainer(tmp_path, number):
    """As Ctrl-C in a terminal and the SIGTERM of a scheduler."""
    workdir = tmp_path / "run"
    flags = ("--workers", "1", "--steps", "100000", "--evaluate-every", "50000", "--save-every", "50000")
    process = begin(workdir, *flags, start_new_session=True)
    wait_for(workdir / "metrics.jsonl", process)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err and "leaked" not in err, err
    assert err.splitlines()[-1] == "stopped and saved; the same command goes on from here"
    assert [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]


def test_a_training_goes_on_when_nobody_reads_its_messages(tmp_path):
    process = begin(tmp_path / "run")
    process.stderr.close()
    out = process.stdout.read()
    assert process.wait(timeout=200) == 0 and "held-out samples" in out
    assert (tmp_path / "run" / "attention.png").exists()


def test_a_signal_to_workers_that_are_starting_says_nothing(tmp_path):
    process = begin(tmp_path / "run", "--workers", "2", "--steps", "100000", start_new_session=True)
    while subprocess.run(["pgrep", "-g", str(process.pid)], stdout=subprocess.PIPE).stdout.count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)  # the workers are importing now
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err and "leaked" not in err, err
