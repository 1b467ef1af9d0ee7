"""A run that was killed and goes on ends bit for bit where a run that was never killed ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.training import Run
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
STEPS = 160
FLAGS = (
    "--model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.num-encoder-layers 1 --model.num-decoder-layers 1 "
    "--model.dropout-rate 0.1 --data.train-size 200 --data.valid-size 8 --data.test-size 8 --batching.tokens 128 "
    f"--batching.pack-length 32 --optimizer.total-steps 200 --steps {STEPS} --evaluate-every 80 --save-every 20 "
    "--log-every 1"
).split()


def begin(workdir, *flags, **environment):
    command = [sys.executable, "train.py", *FLAGS, *flags, "--workdir", str(workdir)]
    environment = {**os.environ, **environment}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_step(workdir, step, process):
    deadline = time.monotonic() + 200
    while not any(line["step"] >= step for line in read_metrics(workdir / "metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended or hangs"
        time.sleep(0.005)


def final_state(workdir):
    run = Run.open(workdir)
    checkpoints = Checkpoints(run.workdir.checkpoints, read_only=True)
    state = checkpoints.restore(jax.eval_shape(run.initial_state))
    return [np.asarray(x) for x in jax.tree.leaves((state.step, state.model, state.optimizer))]


def metrics(workdir):
    lines = read_metrics(workdir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.endswith("per_second")} for line in lines]


def assert_same_run(workdir, other):
    assert metrics(workdir) == metrics(other)
    for a, b in zip(final_state(workdir), final_state(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "never_killed"
    finish(begin(workdir))
    lines = metrics(workdir)
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, STEPS + 1))
    assert [(line["step"], line["split"]) for line in lines if line["split"] != "train"] == [
        (80, "valid"),
        (160, "valid"),
        (160, "test"),
    ]
    return workdir


@pytest.mark.parametrize(("step", "workers"), [(3, 0), (41, 2), (81, 0)])
def test_killed_at_any_moment(never_killed, tmp_path, step, workers):
    workdir = tmp_path / "killed"
    process = begin(workdir, "--workers", str(workers))
    wait_for_step(workdir, step, process)
    process.kill()
    process.wait()
    kept = [int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]
    assert max(kept, default=0) < STEPS
    finish(begin(workdir))
    assert_same_run(workdir, never_killed)


def test_asked_to_stop_it_saves_and_says_how_to_go_on(never_killed, tmp_path):
    workdir = tmp_path / "stopped"
    process = begin(workdir)
    wait_for_step(workdir, 30, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert output.rstrip().endswith("stopped and saved; the same command goes on from here")
    assert "Traceback" not in output
    saved = max(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())
    assert saved == max(line["step"] for line in metrics(workdir))
    finish(begin(workdir))
    assert_same_run(workdir, never_killed)


def test_asked_to_stop_while_compiling(never_killed, tmp_path):
    workdir = tmp_path / "compiling"
    process = begin(workdir, JAX_ENABLE_COMPILATION_CACHE="false")
    while "they are compiled" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in output
    assert not any(line["step"] > 1 for line in metrics(workdir))
    finish(begin(workdir))
    assert_same_run(workdir, never_killed)


def test_a_longer_run_goes_on_from_a_shorter_one(never_killed, tmp_path):
    workdir = tmp_path / "longer"
    finish(begin(workdir, "--steps", "40"))
    finish(begin(workdir))
    assert metrics(workdir)[-1] == metrics(never_killed)[-1]
    for a, b in zip(final_state(workdir), final_state(never_killed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_pmap_trains_like_jit(never_killed, tmp_path):
    workdir = tmp_path / "pmap"
    finish(begin(workdir, "--strategy", "pmap", "--steps", "30", XLA_FLAGS="--xla_force_host_platform_device_count=4"))
    expected = [line["loss"] for line in metrics(never_killed)[:30]]
    np.testing.assert_allclose([line["loss"] for line in metrics(workdir)[:30]], expected, rtol=2e-3)
    # And a run of four devices goes on with one.
    finish(begin(workdir, "--strategy", "jit", "--steps", "32"))
    losses = [line["loss"] for line in metrics(workdir) if line["split"] == "train"]
    np.testing.assert_allclose(losses, [line["loss"] for line in metrics(never_killed)[:32]], rtol=2e-3)
