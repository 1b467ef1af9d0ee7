"""A user's mistake is one line, not a stack trace."""

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from transformer_jax.commands.streams import STANDARD_OUTPUT, prepare_streams
from transformer_jax.errors import UserError, out_of_space
from transformer_jax.training import Interrupted
from transformer_jax.training.interrupt import EXIT_CODE, MESSAGE, SIGNALS, Interrupt, Stopped


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """End the program with one line on standard error for what the user or the operating system has stopped."""
    try:
        with Interrupt().listen(patience=2.0), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            prepare_streams()
            try:
                yield
            except SystemExit:  # after --help, for one
                sys.stdout.flush()
                raise
            sys.stdout.flush()  # while an error can still be told
    except UserError as error:
        _end(f"error: {error}", 1)
    except Interrupted:
        _end(MESSAGE, EXIT_CODE)
    except KeyboardInterrupt as stop:
        stopped = stop if isinstance(stop, Stopped) else Stopped()
        _end(stopped.message, stopped.exit_code)
    except OSError as error:
        _end(_describe(error), 1)


def run_program(main: Callable[[], None]) -> None:
    """Run a program to its end, and one that fails without Python's own end.

    There, threads of XLA, Orbax and Grain that still run can crash the process, and what they say of it buries the line
    that was printed.
    """
    try:
        main()
    except (SystemExit, KeyboardInterrupt) as stop:
        code = Stopped().exit_code if isinstance(stop, KeyboardInterrupt) else stop.code
        if code is None or code == 0:
            raise
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it is ending
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed by the other side, none
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """A warning in one line, without the place in the code that it comes from."""
    if issubclass(category, UserWarning):
        print(f"note: {' '.join(str(message).split())}", file=sys.stderr)


def _end(line: str | None, code: int) -> NoReturn:
    if line is not None:
        text = " ".join(line.splitlines()).encode(errors="backslashreplace").decode()
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
    raise SystemExit(code) from None


def _describe(error: OSError) -> str | None:
    """What the operating system refused, and of which file; None when nobody reads our output any more (`| head`)."""
    if isinstance(error, BrokenPipeError) and error.filename in (None, STANDARD_OUTPUT):
        return None
    reason = error.strerror or str(error) or type(error).__name__
    if isinstance(error, FileExistsError):
        reason = "exists and is not a folder"
    if error.filename is None:
        return f"error: {reason}"
    advice = "free some space" if out_of_space(error) else "give another path, or make this one accessible"
    return f"error: {os.fsdecode(error.filename)}: {reason}; {advice}"
