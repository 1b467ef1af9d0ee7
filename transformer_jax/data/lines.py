"""The lines of a text file by number, at no cost in memory."""

import mmap
import os
from collections.abc import Iterable
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import BinaryIO

import numpy as np

from transformer_jax.data.source import Lazy
from transformer_jax.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NEWLINE, RETURN = b"\n\r"
ENDS = np.dtype("<i8")
CHUNK = 1 << 20  # bytes scanned at once


class Lines(Lazy[str]):
    r"""The lines of a UTF-8 file, each read when it is asked for.

    A line ends at "\n" and at no other break that Unicode knows, so that files which correspond line by line keep doing
    so. A "\r" before the "\n" and a byte order mark are no part of a line. Where the lines end is found out once and
    kept in the user's cache folder, for as long as the file stays as it is.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        with open_text(self.path) as file:
            self._ends = _line_ends(self.path, file)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._begin = len(BYTE_ORDER_MARK) if self._bytes[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, place: int) -> str:
        start = self._ends[place - 1] + 1 if place else self._begin
        line = self._bytes[start : self._ends[place]].removesuffix(b"\r")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where(place)}: byte {error.start + 1} of the line, {line[error.start]:#04x}, is not UTF-8; "
                "convert the file to UTF-8"
            ) from error

    def where(self, place: int) -> str:
        """The file and the line, counted from 1 as editors do."""
        return f"{self.path}, line {place + 1}"

    def filled(self) -> np.ndarray:
        """Whether each line has a character."""
        lengths = np.diff(self._ends, prepend=self._begin - 1) - 1
        filled = lengths > 0
        single = np.flatnonzero(lengths == 1)
        filled[single] = np.frombuffer(self._bytes, np.uint8)[self._ends[single] - 1] != RETURN
        return filled

    def __reduce__(self) -> tuple[type["Lines"], tuple[Path]]:
        return Lines, (self.path,)


def as_paths(paths: Path | str | Iterable[Path | str]) -> tuple[Path, ...]:
    """One path or several, as a config or a notebook may give them."""
    return tuple(map(Path, [paths] if isinstance(paths, (str, Path)) else paths))


def open_text(path: Path) -> BufferedReader:
    """The bytes of a file that is there and has some."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is a pipe or a device" if path.exists() else "does not exist"
        raise UserError(f"{path} {found}; give a text file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if file.peek()[: len(BYTE_ORDER_MARK) + 1] in (b"", BYTE_ORDER_MARK):
        file.close()
        raise UserError(f"{path} is empty; give a file with text in it")
    return file


def _line_ends(path: Path, file: BufferedReader) -> np.ndarray:
    """Where each line ends: mapped from the cache, or from a temporary file where there can be no cache."""
    status = os.fstat(file.fileno())
    key = f"{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    try:
        cached = _cache_folder() / blake2b(os.fsencode(key), digest_size=16).hexdigest()
        if not _is_whole(cached, status.st_size):
            cached.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cached.parent) as folder:
                partial = Path(folder, "ends")
                with partial.open("wb") as index:
                    _scan(file, index)
                partial.replace(cached)
        return np.asarray(np.memmap(cached, ENDS, "r"))
    except (OSError, RuntimeError):  # not writable, or no home to be in
        with TemporaryFile() as index:
            _scan(file, index)
            return np.asarray(np.memmap(index, ENDS, "r"))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "transformer_jax" / "lines"


def _is_whole(index: Path, size: int) -> bool:
    """Whether an index is there, down to the end of its file: a machine that crashes can leave it cut short."""
    try:
        return int(np.memmap(index, ENDS, "r")[-1]) in (size - 1, size)
    except (OSError, ValueError):
        return False


def _scan(file: BufferedReader, index: BinaryIO) -> None:
    r"""Write down where each line of a file ends: the places of "\n", and the end of a last line without one."""
    file.seek(0)
    buffer, place, last = bytearray(CHUNK), 0, NEWLINE
    while count := file.readinto(buffer):
        ends = np.flatnonzero(np.frombuffer(buffer, np.uint8, count) == NEWLINE)
        index.write((ends + place).astype(ENDS).tobytes())
        place, last = place + count, buffer[count - 1]
    if last != NEWLINE:
        index.write(np.array(place, ENDS).tobytes())
    index.flush()
