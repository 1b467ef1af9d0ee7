"""Asked to stop while the main thread cannot notice: as when it is inside the compiler."""

import signal
import subprocess
import sys
import time

PROGRAM = """
import sys, time
from transformer_jax.training.interrupt import Interrupt

answers = [False, False, True]

def rescue():
    print("rescue", flush=True)
    return answers.pop(0)

interrupt = Interrupt()
with interrupt.listen(rescue, patience=0.2):
    print("busy", flush=True)
    time.sleep(60)  # which goes on after a signal, as a compiler does
"""


def test_another_thread_saves_as_soon_as_there_is_something_to_save():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "busy\n"
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.split() == ["rescue"] * 3
    assert err.strip() == "stopped and saved; the same command goes on from here"
    assert time.monotonic() - asked < 50
