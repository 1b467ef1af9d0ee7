"""A process that is killed while it saves loses at most what came after the last complete save.

Each time it is killed right before another change to the folder of checkpoints, the first ones of a save, those around
its commit and those after it among them, and at some moments by the clock, when threads write the arrays.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.training import TrainState
from transformer_jax.training.checkpoints import Checkpoints

ROOT = Path(__file__).parent.parent
COMPLETE = 2  # steps that are saved whole before the one that is cut short
PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from tests.test_kill_during_save import COMPLETE, state_of
from transformer_jax.training.checkpoints import Checkpoints

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

def write(folder, moment):
    checkpoints = Checkpoints(folder, keep=1)
    for step in range(1, COMPLETE + 1):
        checkpoints.save(state_of(step))
        checkpoints.wait()
    seen = []

    def kill_at(event, arguments):
        path = str(arguments[0]) if arguments else ""
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        is_relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # to a folder that is being removed
        if (event in CHANGES or is_write) and (is_relative or path.startswith(str(folder))):
            seen.append(f"{event} {path.removeprefix(str(folder))}")
            if len(seen) - 1 == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at)
    if isinstance(moment, float):
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    checkpoints.save(state_of(COMPLETE + 1))
    checkpoints.wait()
    if moment is None:
        Path(f"{folder}.changes").write_text("\\n".join(seen))
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)

def in_child(folder, moment):
    if not (child := os.fork()):
        try:
            write(folder, moment)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]

root = Path(sys.argv[1])
assert in_child(root / "whole", None) == 0
changes = (root / "whole.changes").read_text().splitlines()
renames = [number for number, change in enumerate(changes) if change.startswith("os.rename")]
around = [number + 1 for number in renames]  # after the first item, after the second, after the commit
for moment in [*range(0, len(changes), 4), *around, len(changes) - 1, 0.01, 0.03, 0.1]:
    assert in_child(root / f"killed at {moment}", moment) == signal.SIGKILL
"""


def state_of(step):
    """Some megabytes, of which every number depends on the step."""
    arrays = [jnp.asarray(np.random.default_rng([step, n]).normal(size=(256, 512)), jnp.float32) for n in range(6)]
    return TrainState(jnp.int32(step), dict(zip("ab", arrays, strict=False)), tuple(arrays[2:]), jax.random.key(step))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, root], cwd=ROOT, check=True, timeout=120)
    return root


def test_the_moments_are_those_of_a_save(killed):
    changes = (killed / "whole.changes").read_text()
    for item in ("model", "training"):
        assert f"/{item}" in changes
    assert "os.rename" in changes  # the commit
    assert changes.splitlines()[-1].startswith(("os.rmdir", "os.remove", "shutil.rmtree"))  # what is not kept


def test_the_newest_step_is_whole_and_what_is_left_over_is_removed(killed):
    folders = list(killed.glob("killed at *"))
    assert len(folders) >= 10
    newest = []
    for folder in folders:
        checkpoints = Checkpoints(folder, keep=1)
        latest = checkpoints.latest()
        assert latest in (COMPLETE, COMPLETE + 1), folder
        newest.append(latest)
        expected, like = state_of(latest), jax.eval_shape(lambda: state_of(1))
        assert plain(checkpoints.restore(like)) == plain(expected), folder
        checkpoints.save(state_of(COMPLETE + 7))
        checkpoints.close()
        assert [path.name for path in folder.iterdir()] == [str(COMPLETE + 7)], folder
    assert set(newest) == {COMPLETE, COMPLETE + 1}  # before the commit, and after it


def plain(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((state.step, state.model, state.optimizer))] + [
        jax.random.key_data(state.key).tolist()
    ]
