"""One training at a time in a workdir: two would remove each other's checkpoints while they are written."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from transformer_jax.atomic import is_remote
from transformer_jax.errors import UserError

NAME = "lock"
"""The file in a workdir that the training in it has locked. It stays when the training ends; the lock does not."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder where there is none and lock it, or raise with the process that has.

    The kernel gives the lock back when the process ends, however it does. A folder with nothing else in it is removed.
    """
    if is_remote(folder):
        _note(folder, "a bucket has no locks")
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = _lock(path)
    try:
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            if list(folder.iterdir()) == [path]:
                path.unlink()
                folder.rmdir()
        os.close(file)


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine is inside for the same folder, which is made where there is none.

    Where folders cannot be locked there is no waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError, ImportError):
            import fcntl  # which Windows has not

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _note(folder: Path, reason: object) -> None:
    print(f"note: {folder} cannot be locked ({reason}); start no second training in it", file=sys.stderr)


def _lock(path: Path) -> int:
    """The open file, locked; on a file system without locks only open, and a note says so."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            import fcntl  # which Windows has not

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 1024).decode(errors="replace") or "another process"
            os.close(file)
            raise UserError(
                f"{path.parent} is in use: {holder} trains in it; wait until it ends or stop it, or give another "
                "--workdir"
            ) from None
        except (OSError, ImportError) as error:
            _note(path.parent, error)
            return file
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):  # noqa: PTH116
                return file
        os.close(file)  # its holder removed it before the lock came to us
