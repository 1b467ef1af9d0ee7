"""Being asked to stop, at any moment: between steps, and while the machine is busy compiling."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""What a run that was stopped exits with: it is not finished, and a scheduler should know."""

MESSAGE = "stopped and saved; the same command goes on from here"


class Interrupted(Exception):
    """The run was asked to stop."""


class Interrupt:
    """Whether SIGTERM or Ctrl-C has come. `check` raises `Interrupted` if so."""

    def __init__(self):
        self.requested = False
        self._noticed = threading.Event()

    def check(self) -> None:
        """Stop here if asked to."""
        if self.requested:
            self._noticed.set()
            raise Interrupted

    @contextlib.contextmanager
    def listen(self, rescue: Callable[[], bool], patience: float = 5.0) -> Iterator[None]:
        """Take the signals while inside.

        Python runs signal handlers between instructions of the main thread only, and that thread can be inside the
        compiler for minutes. So a second thread waits for the signal too: when the main one has not noticed it within
        `patience` seconds, `rescue` is called to save what there is, and the process ends. If it returns False, since
        there is nothing to save in the middle of a step, the step is given as long again.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)

        def wait_for_signal() -> None:
            if reader.recv(1):
                while not self._noticed.wait(patience):
                    if rescue():
                        print(f"\n{MESSAGE}", file=sys.stderr, flush=True)
                        os._exit(EXIT_CODE)

        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=wait_for_signal, daemon=True).start()
        try:
            yield
        finally:
            self._noticed.set()
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # asked twice: at once
            raise KeyboardInterrupt
        self.requested = True
