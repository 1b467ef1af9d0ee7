"""The records of a CSV file by number, at no cost in memory."""

import re
from io import BufferedReader
from typing import BinaryIO

import numpy as np

from transformer_jax.data import lines
from transformer_jax.data.lines import ENDS, NEWLINE, Lines, cached_ends
from transformer_jax.errors import UserError

QUOTE = b'"'[0]
CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^",\n][^,\n]*|))(,|\Z)')
"""A column with quotes around it, in which a quote is doubled; or one without; and the comma after it or the end."""


class CsvRecords(Lines):
    """The records of a UTF-8 file of comma-separated columns (RFC 4180), each read when it is asked for.

    A newline between quotes is part of a record and does not end it, so records are not lines. All else is as for
    `Lines`, which a file without a quote consists of.
    """

    separator = "comma"

    def cells(self, index: int) -> list[str]:
        """The columns of a record, without the quotes around them."""
        text, cells, position = self[index], [], 0
        while match := CELL.match(text, position):
            quoted, plain, separator = match.groups()
            cells.append(plain if quoted is None else quoted.replace('""', '"'))
            if not separator:
                return cells
            position = match.end()
        raise UserError(
            f"{self.where(index, len(text[:position].encode()))} has a quote out of place in column {len(cells)}, "
            'counted from 0; put quotes around the whole column and double those inside, as in "a ""b"" c"'
        )

    def where(self, index: int, position: int = 0) -> str:
        """The file and the line, counted from 1 as editors do, of a byte of a record."""
        end = self._span(index)[0] + position
        line = 1 + sum(
            self._bytes[start : min(start + lines.CHUNK, end)].count(b"\n") for start in range(0, end, lines.CHUNK)
        )
        return f"{self.path}, line {line}"

    def _find_ends(self, file: BufferedReader) -> np.ndarray:
        return cached_ends(self.path, file, scan_csv, "csv")

    def _is_line(self, start: int, end: int) -> bool:
        return self._is_bounded(start, end)  # what is between is for `cells` to judge


def scan_csv(file: BufferedReader, index: BinaryIO) -> None:
    r"""Write down where each record of a CSV file ends: at a "\n" after an even number of quotes, and at the end.

    Quotes come in pairs: around a column, and doubled inside one.
    """
    file.seek(0)
    buffer, position, is_odd, end = bytearray(lines.CHUNK), 0, False, -1
    while count := file.readinto(buffer):
        data = np.frombuffer(buffer, np.uint8, count)
        inside = np.logical_xor.accumulate(data == QUOTE) ^ is_odd
        ends = position + np.flatnonzero((data == NEWLINE) & ~inside)
        index.write(ends.astype(ENDS).tobytes())
        position, is_odd = position + count, bool(inside[-1])
        end = int(ends[-1]) if len(ends) else end
    if end + 1 < position:
        index.write(np.array(position, ENDS).tobytes())
    index.flush()
