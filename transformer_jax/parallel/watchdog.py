"""An end for a process in which nothing happens any more: a collective that never returns, a file system that hangs."""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

HUNG = 124
"""What a process exits with when it hangs, as of the command `timeout`."""
GRACE = 10.0
"""How many times as long the first step may take, which is compiled."""
TELLING = 5.0
"""Seconds to tell others of it."""


class Watchdog:
    """Ends the process, with the stacks of all its threads, when no `beat` comes for some seconds.

    Args:
        seconds: how long to wait for a beat; None waits for ever. The first may take `GRACE` times as long.
        what: what a beat says has ended, for people: "training step".
        tell: is given the line that is printed, to pass it on to others.
    """

    def __init__(self, seconds: float | None, what: str = "step", *, tell: Callable[[str], None] | None = None):
        self._seconds, self._what, self._tell = seconds, what, tell
        self._beats = self._pauses = 0
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            threading.Thread(target=self._watch, args=(self._seconds,), name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def beat(self) -> None:
        """A step has ended."""
        self._beats += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Expect no beats while inside, such as during an evaluation, and wait anew after it."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _watch(self, seconds: float) -> None:
        """Count idle time in ticks of this thread, so that a process that was stopped for a while is not ended."""
        tick = min(seconds / 10, 1.0)
        idle, seen, before = 0.0, 0, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            idle += min(now - before, 2 * tick)
            before = now
            if self._pauses or self._beats != seen:
                idle, seen = 0.0, self._beats
            if idle > seconds * (1.0 if seen else GRACE):
                self._end(f"no {self._what} has ended for {idle:.0f} seconds; the stacks of all threads:")

    def _end(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())  # past Python's own buffers, whose locks another thread may hold
            faulthandler.dump_traceback(file=2)
        if self._tell is not None:
            telling = threading.Thread(target=self._tell, args=(line.partition(";")[0],), daemon=True)
            telling.start()
            telling.join(TELLING)
        os._exit(HUNG)
