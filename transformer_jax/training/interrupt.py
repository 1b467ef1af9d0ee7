"""Being asked to stop, at any moment: between steps, and while the machine is busy compiling."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGTERM
"""What a run that was stopped exits with: it is not finished, and a scheduler should know."""

MESSAGE = "stopped and saved; the same command goes on from here"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """The run was asked to stop."""


class Stopped(KeyboardInterrupt):
    """The program was asked to end at once: there is nothing to save, or it was asked twice."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.exit_code = 128 + number
        """As of a process that the signal has killed."""
        self.message = "interrupted" if number == signal.SIGINT else "terminated"


class Interrupt:
    """Whether SIGTERM or Ctrl-C has come. `check` raises `Interrupted` if so."""

    def __init__(self) -> None:
        self.requested = False
        self._rescue: Callable[[], bool] | None = None
        self._on_request: Callable[[], None] = lambda: None
        self._noticed = threading.Event()

    def check(self) -> None:
        """Stop here if asked to."""
        if self.requested:
            self._noticed.set()
            raise Interrupted

    @contextlib.contextmanager
    def listen(
        self,
        rescue: Callable[[], bool] | None = None,
        patience: float = 5.0,
        on_request: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Take the two signals while inside, and leave all others to whoever handles them.

        With a `rescue` the first signal is only noted, for `check` to find. Without one there is nothing to save, and
        it raises `Stopped` at once, as a second one always does.

        Python runs signal handlers between instructions of the main thread only, and that thread can be inside the
        compiler for minutes. So a second thread waits for the signal too: when the main one has not noticed it within
        `patience` seconds, `rescue` is called to save what there is, and the process ends. If it returns False, since
        there is nothing to save in the middle of a step, the step is given as long again. The second thread also calls
        `on_request` when the first signal comes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._rescue, self._on_request = rescue, on_request
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        others = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader, others, patience), daemon=True).start()
        try:
            yield
        finally:
            self._noticed.set()
            signal.set_wakeup_fd(others)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or self._rescue is None:
            raise Stopped(number)
        self.requested = True

    def _watch(self, reader: socket.socket, others: int, patience: float) -> None:
        """End the process when the main thread does not. Every signal that Python handles comes here as a byte."""
        asked: list[int] = []
        deadline: float | None = None
        with reader:
            while True:
                reader.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                try:
                    numbers = reader.recv(64)
                except TimeoutError:
                    deadline = self._end(asked, patience)
                    continue
                if not numbers:
                    return  # no longer listening
                if others != -1:
                    with contextlib.suppress(OSError):
                        os.write(others, numbers)
                # One that was given another handler since is not ours to act on.
                if ours := [number for number in numbers if signal.getsignal(number) == self._handle]:
                    if not asked:
                        self._on_request()
                    asked += ours
                    deadline = time.monotonic() + (patience if len(asked) == 1 else min(patience, 1.0))

    def _end(self, asked: list[int], patience: float) -> float | None:
        """End the process, or say until when to wait on; None is for the next signal."""
        if len(asked) > 1 or self._rescue is None:
            stopped = Stopped(asked[-1])
            _leave(stopped.message, stopped.exit_code)
        if self._noticed.is_set():
            return None
        with contextlib.suppress(Exception):  # the main thread saves too, and says what is wrong
            if self._rescue():
                leave_saved()
        return time.monotonic() + patience


def leave_saved() -> NoReturn:
    """End the process at once, after its state was saved, from whatever thread."""
    _leave(f"\n{MESSAGE}" if os.isatty(2) else MESSAGE, EXIT_CODE)  # below a progress bar


def _leave(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    os._exit(code)
