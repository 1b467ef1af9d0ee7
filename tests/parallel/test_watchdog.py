"""A process in which nothing happens is ended, and one in which something does is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.parallel.watchdog import HUNG

ROOT = Path(__file__).parent.parent.parent
PRELUDE = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("watchdog", "transformer_jax/parallel/watchdog.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
Watchdog = module.Watchdog
def hang_here():
    threading.Event().wait()
"""


def run(code):
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_it_ends_a_process_that_hangs_and_shows_where():
    code = """
told = lambda line: print(line, flush=True)
with Watchdog(0.2, "training step", tell=told) as watchdog:
    watchdog.beat()
    threading.Thread(target=hang_here, daemon=True).start()
    time.sleep(100)
"""
    ended = run(code)
    assert ended.returncode == HUNG
    assert ended.stdout == "no training step has ended for 0 seconds\n"
    assert ended.stderr.startswith("no training step has ended for 0 seconds; the stacks of all threads:\n")
    assert "in hang_here" in ended.stderr and 'File "<string>", line' in ended.stderr


def test_the_first_step_may_take_longer():
    code = """
module.GRACE = 5.0
with Watchdog(0.2) as watchdog:
    time.sleep(0.6)
    watchdog.beat()
    print("compiled", flush=True)
    time.sleep(100)
"""
    ended = run(code)
    assert (ended.returncode, ended.stdout) == (HUNG, "compiled\n")


def test_a_first_step_that_never_ends_is_ended_too():
    assert run("module.GRACE = 2.0\nwith Watchdog(0.1): time.sleep(100)").returncode == HUNG


@pytest.mark.parametrize(
    "code",
    [
        "with Watchdog(None): time.sleep(0.5)",
        "with Watchdog(0.2) as watchdog:\n    watchdog.beat()\ntime.sleep(0.6)",
        "with Watchdog(0.3) as watchdog:\n    for _ in range(20):\n        watchdog.beat()\n        time.sleep(0.05)",
        "with Watchdog(0.2) as watchdog:\n    watchdog.beat()\n    with watchdog.pause():\n        time.sleep(0.6)",
    ],
    ids=["off", "after it", "steps", "paused"],
)
def test_it_leaves_others_alone(code):
    ended = run(code + "\nprint('done')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
