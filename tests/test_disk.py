"""Training until the disk is full, then with room again. A limit on the size of files stands in for the disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_commands import TINY
from transformer_jax.errors import out_of_space
from transformer_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent


def train(workdir, *flags, limit="unlimited"):
    """Train, with so many kilobytes for a file."""
    command = [
        sys.executable,
        "train.py",
        *TINY,
        "--steps",
        "6",
        "--save-every",
        "2",
        *flags,
        "--workdir",
        str(workdir),
    ]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -S -f {limit}; exec "$@"', "bash", *command],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


def has_no_room(workdir, step, limit):
    code, err = train(workdir, limit=limit)
    assert code == 1 and "Traceback" not in err and "ignored" not in err
    line = f"error: {workdir}: File too large; free some space, and the same command goes on from step {step}"
    assert [line for line in err.splitlines() if "rror" in line and "compilation cache" not in line] == [line]


def test_a_run_goes_on_when_there_is_room_again(tmp_path):
    workdir = tmp_path / "run"
    code, err = train(workdir, "--steps", "2")
    assert code == 0, err
    has_no_room(workdir, 2, limit=40)  # for the second checkpoint
    code, err = train(workdir)
    assert code == 0, err
    steps = [line["step"] for line in read_metrics(workdir / "metrics.jsonl") if line["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("limit", [1, 8, 40], ids=["the config", "the tokenizer", "the first checkpoint"])
def test_no_room_at_the_start(tmp_path, limit):
    has_no_room(tmp_path / "run", 0, limit=limit)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(122, "Disk quota exceeded", "file"), "Disk quota exceeded"),
        (ValueError('RESOURCE_EXHAUSTED: writing "x": [OS error 28: ENOSPC No space left on device]'), "No space left"),
        (Exception("No space left on device (os error 28)"), "No space left on device"),
        (OSError(13, "Permission denied"), None),
        (ValueError("shape"), None),
    ],
)
def test_a_full_disk_is_found_behind_any_error(error, reason):
    def found(error):
        return (out_of_space(error) or "").startswith(reason or "-") if reason else out_of_space(error) is None

    assert found(error)
    later = RuntimeError("handle is closed")
    later.__context__ = error
    assert found(later)
