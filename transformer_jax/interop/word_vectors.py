"""Word vectors from the files of word2vec (text and binary), GloVe and fastText (.vec), as the rows of an embedding.

`load_word_vectors(path, spellings(tokens))` is the table for a tokenizer's vocabulary. A file is read once, from start
to end, and only the vectors that were asked for are kept.
"""

import gzip
import zlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
from tokenizers import decoders

from transformer_jax.errors import UserError
from transformer_jax.interop.untrusted import shown

GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FLOAT = np.dtype("<f4")
BLOCK = 1 << 24  # bytes of a binary file read at once
LONGEST_WORD = 1 << 16  # bytes, in a binary file
LONGEST_LINE = 1 << 20  # bytes
LARGEST_SIZE = 1 << 16  # values of a vector
MOST_DIGITS = 15  # of a number in the first line

WORD_BEGINS, WORD_GOES_ON = ("▁", "Ġ", " "), "##"

File = BufferedReader | gzip.GzipFile


@dataclass(frozen=True)
class WordVectors:
    """The vectors of a list of words: row i is the vector of word i, or zeros if the file has none."""

    table: np.ndarray
    """[words, size], float32."""
    found: np.ndarray
    """[words], whether the file has a vector for the word."""

    @property
    def missing(self) -> int:
        """How many of the words have no vector in the file."""
        return int(np.sum(~self.found))


def load_word_vectors(path: Path, words: Sequence[str]) -> WordVectors:
    r"""The vectors that a file has for `words`.

    A text file has a line for each word: the word, which may contain spaces, and its vector. A line "COUNT SIZE" may
    come first. A binary file has that line, and then for each word its bytes, a space, its vector in float32, and
    perhaps a "\n". Which of the two a file is, is found by what follows its first line. Both may be compressed with
    gzip. If a word has two vectors, the first is taken. The empty word has none. Memory is allocated for vectors that
    were read, not for those that the first line promises.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        rows.setdefault(word, []).append(row)
    rows.pop("", None)
    try:
        with _opened(path) as file:
            layout = _layout(path, file)
            table, found = np.zeros((len(words), 0), np.float32), np.zeros(len(words), bool)
            for word, vector in (_text if layout.is_text else _binary)(path, file, layout, rows):
                if not np.isfinite(vector).all():
                    raise UserError(f"{path}: the vector of {shown(word)} is not finite; fix or delete it")
                if not table.size:
                    table = np.zeros((len(words), layout.size), np.float32)
                same = rows.pop(word)  # so that a second vector of the word is not wanted
                table[same], found[same] = vector, True
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}; give a complete file of word vectors") from error
    return WordVectors(table if table.size else np.zeros((len(words), layout.size), np.float32), found)


def spellings(tokens: Sequence[str]) -> list[str]:
    """The words that the tokens of a vocabulary stand for, and "" for a token that only continues a word.

    Tokenizers mark tokens that begin a word (SentencePiece "▁the", byte-level "Ġthe", ours " the") or that continue one
    (WordPiece "##ing"). The mark that most tokens have is taken to be the tokenizer's, since each mark may also occur
    in a text. Without any mark, all tokens are words. The beginning of a longer word cannot be told from a word.
    """
    marks = (*WORD_BEGINS, WORD_GOES_ON)
    counts = {mark: sum(token.startswith(mark) for token in tokens) for mark in marks}
    mark = max(marks, key=lambda mark: counts[mark])
    if not counts[mark]:
        return list(tokens)
    if mark == WORD_GOES_ON:
        return ["" if token.startswith(mark) else token for token in tokens]
    words = [token.removeprefix(mark) if token.startswith(mark) else "" for token in tokens]
    if mark == "Ġ":  # then each letter stands for a byte of UTF-8
        decoder = decoders.ByteLevel()
        words = [decoder.decode([word]) for word in words]
    return words


@dataclass(frozen=True)
class _Layout:
    """The format of a file, after its first line if that has the sizes."""

    is_text: bool
    size: int
    count: int | None = None  # only text files may leave it out


def _opened(path: Path) -> File:
    file = path.open("rb")
    if not file.peek(len(GZIP)).startswith(GZIP):
        return file
    file.close()
    return gzip.open(path)


def _layout(path: Path, file: File) -> _Layout:
    begin = len(BYTE_ORDER_MARK) if file.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK) else 0
    file.seek(begin)
    first = file.readline(LONGEST_LINE)
    match first.split():
        case [count, size] if count.isdigit() and size.isdigit() and size.strip(b"0"):
            num_vectors, num_values = _checked(path, count, size)
            begin = file.tell()
            # In a vector of bytes there are hardly any numbers; in one with an error there still are most.
            is_text = 2 * _num_values(file.readline(LONGEST_LINE)) >= num_values
            layout = _Layout(is_text, num_values, num_vectors)
        case _:
            layout = _Layout(True, _num_values(first))
    if not layout.size:
        raise UserError(
            f"{path} begins neither with COUNT SIZE nor with a word and its vector; "
            "give a file of word2vec, text or binary, or of GloVe"
        )
    file.seek(begin)
    return layout


def _checked(path: Path, count: bytes, size: bytes) -> tuple[int, int]:
    """The numbers in the first line of a file; raises if no file can have them."""
    if max(len(count), len(size)) <= MOST_DIGITS and int(count) and int(size) <= LARGEST_SIZE:
        return int(count), int(size)
    said = f"{shown(count.decode())} vectors of {shown(size.decode())} values"
    raise UserError(f"{path} has a first line that says {said}, but there must be 1 or more of at most {LARGEST_SIZE}")


def _num_values(line: bytes) -> int:
    """How many numbers there are on a line after its first word."""
    return sum(map(_is_number, line.split()[1:]))


def _is_number(value: bytes) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _text(path: Path, file: File, layout: _Layout, wanted: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    count, size = layout.count, layout.size
    num_vectors = 0
    lines = iter(partial(file.readline, LONGEST_LINE), b"")
    for number, line in enumerate(lines, start=1 if count is None else 2):
        if len(line) == LONGEST_LINE:
            raise UserError(f"{path}, line {number}: it has more than {LONGEST_LINE} bytes; fix the line")
        line = line.rstrip(b" \r\n")  # word2vec writes a space after every value
        if not line:
            continue
        num_vectors += 1
        num_spaces = line.count(b" ")
        if num_spaces < size:
            raise UserError(f"{path}, line {number}: {num_spaces} values after the word, not {size}; fix the line")
        # Most words are not wanted and have no space in them: the vector needs no splitting to find them.
        name = line[: line.index(b" ")] if num_spaces == size else line.rsplit(b" ", size)[0]
        word = name.decode(errors="surrogateescape")
        if word in wanted:
            try:
                values = [float(value) for value in line.rsplit(b" ", size)[1:]]
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {shown(str(error))}; fix the line") from error
            with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and found to be
                yield word, np.array(values, np.float32)
    if count not in (None, num_vectors):
        raise UserError(f"{path} has {num_vectors} vectors but its first line says {count}; get it again, or fix that")


def _binary(path: Path, file: File, layout: _Layout, wanted: Container[str]) -> Iterator[tuple[str, np.ndarray]]:
    count, num_bytes = layout.count or 0, layout.size * FLOAT.itemsize
    content, position = b"", 0
    for number in range(count):
        while len(content) - position < LONGEST_WORD + num_bytes and (block := file.read(BLOCK)):
            content, position = content[position:] + block, 0
        space = content.find(b" ", position)
        end = space + 1 + num_bytes
        if space < 0 or end > len(content):
            raise UserError(
                f"{path} is cut short or damaged: it has {number} complete vectors of {count}; get it again"
            )
        word = content[position:space].lstrip(b"\n").decode(errors="surrogateescape")
        if word in wanted:
            yield word, np.frombuffer(content, FLOAT, layout.size, space + 1)
        position = end
    if (content[position:] + file.read(1)).strip(b"\n"):
        raise UserError(f"{path} continues after the {count} vectors that its first line says; get it again")
