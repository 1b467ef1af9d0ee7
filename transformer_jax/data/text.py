"""Plain text for language models: in files, or the documentation that comes with Python."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from transformer_jax.data.documentation import python_documentation
from transformer_jax.data.lines import Lines, as_paths, open_text
from transformer_jax.data.source import Chosen, Document, Joined, Lazy, Source, Split, check_split
from transformer_jax.errors import UserError

Unit = Literal["file", "paragraph", "line"]

PIECE = 1 << 20  # bytes
CONTINUATION = {bytes([byte]) for byte in range(0x80, 0xC0)}  # all but the first of a character in UTF-8


@dataclass(frozen=True)
class Text(Source[Document]):
    """Plain text to learn a language from."""

    train: tuple[Path, ...] = ()
    """Text files to train on; the default is the documentation in Python's standard library, a document per module."""
    valid: tuple[Path, ...] = ()
    """Text files to evaluate on during the training."""
    test: tuple[Path, ...] = ()
    """Text files to evaluate the trained model on."""
    document: Unit = "file"
    """What a document is: a whole file, read as one stream in pieces of a mebibyte; a paragraph, up to an empty line;
    or a line."""
    valid_fraction: float = 0.1
    """Fraction of the training text that is held out to evaluate on where there are no valid files: the end of the
    files, or some of Python's modules."""

    def __post_init__(self) -> None:
        for name in get_args(Split):
            object.__setattr__(self, name, as_paths(getattr(self, name)))
        if self.document not in get_args(Unit):
            raise UserError(f"document={self.document!r} is not one of {', '.join(get_args(Unit))}")
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"valid_fraction={self.valid_fraction} must be at least 0 and below 1")

    def split(self, name: Split) -> Sequence[Document]:
        """The documents of "train", "valid" or "test", each read when it is asked for."""
        check_split(name)
        if name == "test" or self.valid:
            return _Documents(self._texts(getattr(self, name)))
        if self.train:
            return _Documents(self._texts(self.train, name))
        if self.test:  # to evaluate on alone: Python's documentation has nothing to do with it
            return ()
        held_out = name == "valid"
        modules = python_documentation()
        return [{"text": text} for module, text in modules if (_hash(module) < self.valid_fraction) == held_out]

    def fields(self) -> tuple[str, ...]:
        """A document is a text."""
        return ("text",)

    def files(self) -> Sequence[Path]:
        """The files of train."""
        return self.train

    def _texts(self, paths: Sequence[Path], split: Split | None = None) -> Sequence[str]:
        """The texts in files: all of them, or those before or after the position that divides train from valid."""
        if self.document == "file":
            sizes = [_size(path) for path in paths]
            chosen = self._range(sum(sizes), split)
            starts = accumulate(sizes, initial=0)
            return Joined(
                _Pieces(path, max(chosen.start - start, 0), min(chosen.stop - start, size))
                for path, size, start in zip(paths, sizes, starts, strict=False)
            )
        lines = map(Lines, paths)
        texts: Joined[str] = Joined(lines if self.document == "line" else map(_paragraphs, lines))
        return Chosen(texts, self._range(len(texts), split))

    def _range(self, total: int, split: Split | None) -> range:
        """Of so many documents or bytes, those of train, of valid, or all."""
        cut = max(1, total - math.ceil(total * self.valid_fraction))
        return range(cut if split == "valid" else 0, cut if split == "train" else total)


@dataclass(frozen=True)
class _Documents(Lazy[Document]):
    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def item(self, index: int) -> Document:
        return {"text": self.texts[index]}


@dataclass(frozen=True)
class _Pieces(Lazy[str]):
    """The characters that begin in a range of the bytes of a file, so many bytes at a time. Put together, they are it.

    A file is open only while it is read, for there may be thousands.
    """

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, -(-(self.stop - self.start) // PIECE))

    def item(self, index: int) -> str:
        start = self.start + index * PIECE
        size = min(PIECE, self.stop - start)
        with open_text(self.path) as file:
            file.seek(start)
            data = file.read(size + 3)  # the last character may have three bytes more
        first, end = _character(data, 0) if start else 0, _character(data, size)
        try:
            text = data[first:end].decode()
        except UnicodeDecodeError:
            for _ in Lines(self.path):  # which raises, and knows the number of the line
                pass
            raise
        text = text.removeprefix("\ufeff") if start == 0 else text
        text = text.removesuffix("\r") if data[end : end + 1] == b"\n" else text
        return text.replace("\r\n", "\n")


def _character(data: bytes, position: int) -> int:
    """Where the first character from a position on begins: after what is left of another, three bytes at most."""
    return next((at for at in range(position, position + 3) if data[at : at + 1] not in CONTINUATION), position + 3)


@dataclass(frozen=True)
class _Paragraphs(Lazy[str]):
    lines: Lines
    bounds: np.ndarray
    """The first line of each paragraph and the one after its last."""

    def __len__(self) -> int:
        return len(self.bounds)

    def item(self, index: int) -> str:
        first, end = self.bounds[index]
        return "\n".join(self.lines[first:end])


def _paragraphs(lines: Lines) -> _Paragraphs:
    changes = np.flatnonzero(np.diff(lines.filled(), prepend=False, append=False))
    return _Paragraphs(lines, changes.reshape(-1, 2))


def _size(path: Path) -> int:
    with open_text(path) as file:
        return os.fstat(file.fileno()).st_size


def _hash(name: str) -> float:
    """A number from 0 to 1 that is the same in every process and version."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") / 2**32
