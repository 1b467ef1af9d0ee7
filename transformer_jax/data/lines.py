"""The lines of a text file by number, at no cost in memory."""

import mmap
import os
from collections.abc import Callable, Iterable
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
NUM_SAMPLES, SAMPLE = 64, 1 << 12  # pieces of a file, and bytes of each, that its index is known by


class Lines(Lazy[str]):
    r"""The lines of a UTF-8 file, each read when it is asked for.

    A line ends at "\n" and at no other break that Unicode knows, so that files which correspond line by line keep doing
    so. A "\r" before the "\n" and a byte order mark are no part of a line. Where the lines end is found out once and
    kept in the user's cache folder, for as long as the file stays as it is; a file that changes while it is open is an
    error, not another line.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        with open_text(self.path) as file:
            self._ends = self._find_ends(file)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._begin = len(BYTE_ORDER_MARK) if self._bytes[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, index: int) -> str:
        start, end = self._span(index)
        # The size first: reading what is mapped beyond the end of its file would kill the process.
        if self._bytes.size() != len(self._bytes) or not self._is_line(start, end):
            raise UserError(
                f"{self.path} was changed while it was being read; start again with a file that stays as it is"
            )
        line = self._bytes[start:end].removesuffix(b"\r")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            column = error.start - line.rfind(b"\n", 0, error.start)
            raise UserError(
                f"{self.where(index, error.start)}: byte {column} of the line, {line[error.start]:#04x}, is not UTF-8; "
                "convert the file to UTF-8"
            ) from error

    def _find_ends(self, file: BufferedReader) -> np.ndarray:
        return cached_ends(self.path, file, scan_lines, "lines")

    def _span(self, index: int) -> tuple[int, int]:
        """Where a line begins and ends, in bytes."""
        return int(self._ends[index - 1]) + 1 if index else self._begin, int(self._ends[index])

    def _is_line(self, start: int, end: int) -> bool:
        """Whether this is where a line begins and ends: what an index of another file would not know."""
        return self._is_bounded(start, end) and self._bytes.find(b"\n", start, end) < 0

    def _is_bounded(self, start: int, end: int) -> bool:
        begins = start == self._begin or self._bytes[start - 1] == NEWLINE
        return begins and (end == len(self._bytes) or self._bytes[end] == NEWLINE)

    def where(self, index: int, position: int = 0) -> str:
        """The file and the line, counted from 1 as editors do, of a byte of an item."""
        return f"{self.path}, line {index + 1}"

    def filled(self) -> np.ndarray:
        """Whether each line has a character."""
        lengths = np.diff(self._ends, prepend=self._begin - 1) - 1
        filled = lengths > 0
        single = np.flatnonzero(lengths == 1)
        filled[single] = np.frombuffer(self._bytes, np.uint8)[self._ends[single] - 1] != RETURN
        return filled

    def __reduce__(self) -> tuple[type["Lines"], tuple[Path]]:
        return type(self), (self.path,)


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


Scan = Callable[[BufferedReader, BinaryIO], None]


def cached_ends(path: Path, file: BufferedReader, scan: Scan, kind: str) -> np.ndarray:
    """What a scan writes down: mapped from the cache, or from a temporary file where there can be no cache."""
    status = os.fstat(file.fileno())
    try:
        mark = _mark(file, status)
        name = os.fsencode(path.resolve()) + b"\0" + kind.encode()
        cached = _cache_folder() / blake2b(name, digest_size=16).hexdigest()
        if (ends := _cached_ends(cached, mark, status.st_size)) is not None:
            return ends
        cached.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cached.parent) as folder:
            partial = Path(folder, "ends")
            with partial.open("wb") as index:
                index.write(mark)
                scan(file, index)
            ends = np.memmap(partial, ENDS, "r")[len(mark) // ENDS.itemsize :]
            partial.replace(cached)
        return np.asarray(ends)
    except (OSError, RuntimeError):  # not writable, or no home to be in
        with TemporaryFile() as index:
            scan(file, index)
            return np.asarray(np.memmap(index, ENDS, "r"))


def _mark(file: BufferedReader, status: os.stat_result) -> bytes:
    """What tells a file from any other, before or after it at the same path.

    Its size and time are not enough: `cp -p` and `mv` bring theirs along. No program can set the time of the last
    change of status (ctime), nor choose an inode. Where a file system keeps neither, samples of the content are left,
    which are all of a small file.
    """
    known = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digest = blake2b(repr(known).encode(), digest_size=16)
    for start in np.linspace(0, max(status.st_size - SAMPLE, 0), NUM_SAMPLES, dtype=np.int64):
        file.seek(start)
        digest.update(file.read(SAMPLE))
    return digest.digest()


def _cached_ends(index: Path, mark: bytes, size: int) -> np.ndarray | None:
    """What an index has, if it is that of this file, and down to its end: a crash can leave it cut short."""
    try:
        words = np.asarray(np.memmap(index, ENDS, "r"))
    except (OSError, ValueError):
        return None
    first = len(mark) // ENDS.itemsize
    is_whole = len(words) > first and words[-1] in (size - 1, size)
    return words[first:] if is_whole and words[:first].tobytes() == mark else None


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "transformer_jax" / "lines"


def scan_lines(file: BufferedReader, index: BinaryIO) -> None:
    r"""Write down where each line of a file ends: the positions of "\n", and the end of a last line without one."""
    file.seek(0)
    buffer, position, last = bytearray(CHUNK), 0, NEWLINE
    while count := file.readinto(buffer):
        ends = np.flatnonzero(np.frombuffer(buffer, np.uint8, count) == NEWLINE)
        index.write((ends + position).astype(ENDS).tobytes())
        position, last = position + count, buffer[count - 1]
    if last != NEWLINE:
        index.write(np.array(position, ENDS).tobytes())
    index.flush()
