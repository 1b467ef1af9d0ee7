"""Standard input, output and error, whatever the shell and the locale have made of them."""

import io
import os
import sys
from typing import Any

from transformer_jax.errors import UserError

STANDARD_OUTPUT = "standard output"


def prepare_streams() -> None:
    """Make the output UTF-8 in every locale, and take in what is closed."""
    _fill_closed_descriptors()
    if sys.stdout is None:
        raise UserError("standard output is closed; send it to a file, or to /dev/null")
    if sys.stdout is sys.__stdout__:
        # A file name that is no text is written as the bytes that it has.
        output = io.BufferedWriter(_Output(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(output, "utf-8", "surrogateescape", line_buffering=output.isatty())
    if sys.stderr is sys.__stderr__:
        messages = io.BufferedWriter(_Messages(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(messages, "utf-8", "backslashreplace", line_buffering=True)


def keep_output_apart() -> None:
    """Have standard output to ourselves: what libraries print to it, such as Gloo, goes to standard error instead."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    output = io.BufferedWriter(_Output(own, "w"))
    sys.stdout = io.TextIOWrapper(output, "utf-8", "surrogateescape", line_buffering=output.isatty())


def argument_text(name: str, value: str) -> str:
    """A text from the command line, which Python has decoded by the locale."""
    try:
        return os.fsencode(value).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start + 1} of the {name}, {error.object[error.start]:#04x}, is not UTF-8; give UTF-8"
        ) from None
    except UnicodeEncodeError:
        return value  # not from the command line


class _Output(io.FileIO):
    """Standard output, with its name in errors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from None


class _Messages(io.FileIO):
    """Standard error. What nobody takes in is lost: nobody could be told, and a training goes on without."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _fill_closed_descriptors() -> None:
    """Or the next file that is opened would be number 0, 1 or 2, and take in what libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
