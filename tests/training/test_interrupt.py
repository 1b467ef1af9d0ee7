"""Asked to stop, also while the main thread cannot notice: as when it is inside the compiler."""

import os
import signal
import subprocess
import sys
import time

import pytest

from transformer_jax.training.interrupt import Interrupt, Interrupted, Stopped

PROGRAM = """
import sys, time
from transformer_jax.training.interrupt import Interrupt

answers = [False, False, True]

def rescue():
    print("rescue", flush=True)
    return answers.pop(0)

def busy():
    print("busy", flush=True)
    while True:
        time.sleep(60)  # which goes on after a signal, as a compiler does

"""
IN_A_RUN = "with Interrupt().listen(patience=0.1), Interrupt().listen(rescue, patience=0.2): busy()"
BEFORE_A_RUN = """
with Interrupt().listen(patience=0.2):
    for text in ("busy\\n", "", ""):
        try:
            print(text, end="", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # swallowed, as by a callback of the garbage collector
"""


def start(program):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "busy\n"
    return process


def test_another_thread_saves_as_soon_as_there_is_something_to_save():
    process = start(IN_A_RUN)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.split() == ["rescue"] * 3
    assert err.strip() == "stopped and saved; the same command goes on from here"
    assert time.monotonic() - asked < 50


@pytest.mark.parametrize(("number", "line"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_program_ends_even_if_the_main_thread_does_not_hear(number, line):
    process = start(BEFORE_A_RUN)
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err.strip()) == (128 + number, line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number):
    interrupt = Interrupt()
    with interrupt.listen(lambda: False):
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted):
            interrupt.check()
        with pytest.raises(Stopped) as stop:
            os.kill(os.getpid(), number)
    assert stop.value.exit_code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_anything_to_save_the_first_signal_stops(number):
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stop, Interrupt().listen():
        os.kill(os.getpid(), number)
    assert stop.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGWINCH, signal.SIGCHLD, signal.SIGALRM])
def test_other_signals_stay_with_their_handlers(number):
    handled, rescued = [], []
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.signal(number, lambda *_: handled.append(number))
    descriptor = signal.set_wakeup_fd(writer)
    try:
        interrupt = Interrupt()
        with interrupt.listen(lambda: bool(rescued.append(number)), patience=0.05):
            os.kill(os.getpid(), number)
            time.sleep(0.3)
            interrupt.check()
            assert os.read(reader, 10) == bytes([number])
        assert (handled, rescued) == ([number], [])
        assert signal.set_wakeup_fd(descriptor) == writer
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(number, before)
        os.close(reader)
        os.close(writer)
