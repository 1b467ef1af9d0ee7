"""Reading of files that come from others and may be wrong or hostile.

JSON without duplicate keys, pickles that need no more memory than they are long, and names short enough for an error.
"""

import json
import pickletools
from collections import Counter
from io import SEEK_END
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

LONGEST_SHOWN = 80  # characters of a name in an error
LONGEST_PICKLE = 100_000_000  # bytes; the largest models have far less, beside their storages


def json_object(content: bytes) -> dict[str, Any]:
    """The JSON object in these bytes, in UTF-8. Anything else is a ValueError, and so is a duplicate key."""
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    return found


def checked_pickle(file: BinaryIO) -> bytes:
    """The bytes of the pickle at the current position of a file, which is left after it; else a ValueError.

    The library that runs a pickle allocates as much memory as the pickle says. So the pickle is scanned before: every
    text must be in it to its end, and no object may have a number larger than the bytes before it.
    """
    begin = file.tell()
    for operation, argument, position in pickletools.genops(_Limited(file)):  # type: ignore[arg-type]
        if operation.name == "DUP":  # a few of which make a tuple that takes years to hash
            raise ValueError("its pickle repeats an object, as torch never does")
        if "PUT" in operation.name and argument > position:  # type: ignore[operator]
            raise ValueError(f"its pickle numbers an object {shown(argument)}")
    num_bytes = file.tell() - begin
    file.seek(begin)
    return file.read(num_bytes)


class _Limited:
    """A file from its current position on. A read is limited to the bytes that there are."""

    def __init__(self, file: BinaryIO):
        self._file, self._begin = file, file.tell()
        self._end = min(file.seek(0, SEEK_END), self._begin + LONGEST_PICKLE)
        file.seek(self._begin)

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def read(self, size: int) -> bytes:
        return self._file.read(max(0, min(size, self._end - self._file.tell())))

    def readline(self) -> bytes:
        return self._file.readline(max(0, self._end - self._file.tell()))


def shown(text: Any) -> str:
    """Any text for an error of one line: as it is, or shortened, and escaped where it would break the line."""
    text = text if isinstance(text, str) else repr(text)
    short = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
    return short if short.isprintable() else ascii(short)


def is_file_name(name: str) -> bool:
    """Whether this is the name of a file and not a path, on any system: "../x", "/x", "C:x" and "." are not."""
    windows = PureWindowsPath(name)
    return name not in ("", "..") and "\0" not in name and PurePosixPath(name).name == name == windows.name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"its JSON has {shown(twice)} twice")
    for key in found:
        key.encode()  # which half of a surrogate pair alone cannot be
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"its JSON has {name}")
