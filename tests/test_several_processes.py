"""Two processes of two devices train like one, stop together, and go on where they stopped, whatever ends them."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.test_resume import FLAGS, ROOT, begin, final_state, finish, metrics, wait_for_step

STEPS = ("--steps", "60", "--evaluate-every", "60")


def launch(*arguments, restarts=0, **environment):
    command = [sys.executable, "-m", "transformer_jax", "launch", "--processes", "2", "--devices-per-process", "2"]
    command += ["--max-restarts", str(restarts), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, text=True, **pipes)


def train(workdir, *flags, restarts=0, **environment):
    arguments = ("train.py", *FLAGS, *STEPS, *flags, "--workdir", str(workdir))
    return launch(*arguments, restarts=restarts, **environment)


def processes_of(launcher):
    """The processes that a launcher has started, by their index."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
        if len(children) == 2:
            return [int(child) for child in children]
        time.sleep(0.05)
    raise AssertionError("the launcher has not started its processes")


def assert_same_run(workdir, other):
    assert metrics(workdir) == metrics(other)
    for a, b in zip(final_state(workdir), final_state(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "never_stopped"
    output = finish(train(workdir))
    assert "jit on 4 devices of 2 processes (cpu), data=4" in output
    assert all(line.startswith(("[0] ", "[1] ", "launch:")) for line in output.splitlines() if line)
    return workdir


def test_the_losses_are_those_of_one_process(never_stopped, tmp_path):
    """Sums over four devices are added up in another order: that is rounding, which each update passes on."""
    finish(begin(tmp_path / "one", *STEPS))
    found, expected = (
        [line["loss"] for line in metrics(workdir) if line["split"] == "train"]
        for workdir in (never_stopped, tmp_path / "one")
    )
    assert len(found) == 60
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    scores = [
        [line for line in metrics(workdir) if line["split"] == "test"] for workdir in (never_stopped, tmp_path / "one")
    ]
    assert scores[0][0]["loss"] == pytest.approx(scores[1][0]["loss"], rel=2e-3)


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_is_asked_to_stop_stops_all_after_the_same_step(never_stopped, tmp_path, index):
    workdir = tmp_path / "stopped"
    launcher = train(workdir)
    wait_for_step(workdir, 10 + index, launcher)
    os.kill(processes_of(launcher)[index], signal.SIGTERM)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, output
    assert output.count("stopped and saved; the same command goes on from here") == 2
    (step,) = [int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()][-1:]
    assert 10 < step < 60
    finish(train(workdir))
    assert_same_run(workdir, never_stopped)


def test_one_that_is_killed_ends_the_other_and_both_start_again(never_stopped, tmp_path):
    workdir = tmp_path / "killed"
    launcher = train(workdir, restarts=1)
    wait_for_step(workdir, 25, launcher)
    os.kill(processes_of(launcher)[1], signal.SIGKILL)
    output = finish(launcher)
    assert "[0] process 1 of 2" in output and "is gone" in output
    assert "going on from step 20" in output
    assert_same_run(workdir, never_stopped)


def test_asked_to_stop_while_compiling_it_ends_and_nothing_is_lost(tmp_path, never_stopped):
    workdir = tmp_path / "compiling"
    launcher = train(workdir, JAX_ENABLE_COMPILATION_CACHE="false")
    while "they are compiled" not in launcher.stdout.readline():
        assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 143 and "Traceback" not in output, output
    finish(train(workdir))
    assert_same_run(workdir, never_stopped)


def test_asked_to_stop_while_evaluating_the_state_is_rescued(tmp_path):
    workdir = tmp_path / "evaluating"
    flags = ("--evaluate-every", "5", "--evaluate-examples", "3000", "--data.valid-size", "3000", "--save-every", "100")
    launcher = train(workdir, *flags)
    wait_for_step(workdir, 5, launcher)
    time.sleep(0.5)
    os.kill(processes_of(launcher)[1], signal.SIGTERM)
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 143, output
    assert [path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()] == ["5"]


def test_two_processes_start_from_a_run_together(never_stopped, tmp_path):
    sizes = ("--data.train-size", "100", "--data.valid-size", "4", "--data.test-size", "4", "--steps", "2")
    where = ("--init-from", str(never_stopped), "--workdir", str(tmp_path / "started"))
    output = finish(launch("train.py", *sizes, *where))
    assert f"started from {never_stopped}: " in output


def test_a_run_of_two_processes_is_used_by_one_and_by_two(never_stopped):
    lines = "<de> March 4, 2025\n<ja> 12:30\n<fr> Tuesday\n"
    generate = ("-m", "transformer_jax", "generate", str(never_stopped))
    alone = subprocess.run(
        [sys.executable, *generate], input=lines, capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert len(alone.stdout.splitlines()) == 3
    output, _ = (launcher := launch(*generate)).communicate(lines, timeout=100)
    assert launcher.returncode == 0, output
    assert output.splitlines() == [f"[0] {line}" for line in alone.stdout.splitlines()]


def test_a_loss_that_is_not_finite_stops_all_with_the_place_and_the_batches(tmp_path):
    workdir = tmp_path / "not_finite"
    launcher = train(workdir, "--optimizer.peak", "1e30", "--optimizer.warmup-steps", "1")
    output, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1 and "Traceback" not in output, output
    (step,) = {int(path.name.split("_")[-1].split(".")[0]) for path in workdir.glob("not_finite_*")}
    assert {path.name for path in workdir.glob("not_finite_*")} == {f"not_finite_{step}.{n}.npz" for n in range(2)}
    assert f"at step {step}: first in the " in output and "there is no checkpoint yet" in output
