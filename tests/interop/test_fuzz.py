"""Damaged files of weights: each is loaded or refused in one line, and takes no more memory than the file is large."""

import gzip
import struct
import tracemalloc
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from transformer_jax.errors import UserError
from transformer_jax.interop.tensors import Writable, open_tensors, write_tensors
from transformer_jax.interop.word_vectors import load_word_vectors

FILES = Path(__file__).parent / "files"
ROUNDS = 100
NUMBERS = [b"0", b"-1", b"9" * 19, b"1e999", b"true", b"null", b"[]", b"{}", b'"', b"9" * 5000, b"\xff\xff\xff\xff\x7f"]


def mutated(content: bytes, random: Random) -> bytes:
    """The bytes with a few of them changed, cut out, repeated, or replaced by what a parser may trip over."""
    for _ in range(random.choice((1, 1, 2, 5))):
        position, length = random.randrange(len(content) + 1), random.choice((1, 1, 2, 4, 8, 30))
        old = content[position : position + length]
        others = [
            random.randbytes(len(old)),
            bytes(byte ^ (1 << random.randrange(8)) for byte in old[:1]) + old[1:],
            b"",
            old * 2,
            random.choice(NUMBERS),
            b"\xff" * len(old),
        ]
        content = content[:position] + random.choice(others) + content[position + length :]
    return content[: random.randrange(1, len(content) + 1)] if content and random.random() < 0.1 else content


def safetensors(path: Path) -> Path:
    arrays = {"a.weight": np.arange(6.0).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16), "é": np.ones((), np.int8)}
    save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    return path / "model.safetensors"


def index(path: Path) -> Path:
    tensors = {name: Writable((2,), np.dtype(np.float32), lambda: np.ones(2, np.float32)) for name in "abc"}
    write_tensors(path, tensors, shard_bytes=8)
    return path / "model.safetensors.index.json"


def copied(name: str):
    def copy(path: Path) -> Path:
        (path / "model.bin").write_bytes((FILES / name).read_bytes())
        return path / "model.bin"

    return copy


def vectors(content: bytes):
    def write(path: Path) -> Path:
        (path / "vectors.txt").write_bytes(content)
        return path / "vectors.txt"

    return write


TEXT = b"3 4\nthe 1 2 3 4\nNew York 0.5 1e-3 -2 4\ncat 1 2 3 4\n"
BINARY = b"2 4\n" + b"".join(word + b" " + struct.pack("<4f", 1, 2, 3, 4) + b"\n" for word in (b"the", b"cat"))
MADE = {
    "safetensors": safetensors,
    "index": index,
    "zip": copied("zip.bin"),
    "legacy": copied("legacy.bin"),
    "word2vec": vectors(TEXT),
    "word2vec binary": vectors(BINARY),
    "glove": vectors(TEXT[4:]),
    "gzip": vectors(gzip.compress(TEXT, mtime=0)),
}


def load(path: Path) -> None:
    if path.suffix == ".txt":
        load_word_vectors(path, ["the", "cat", "New York", *"abcdef"] * 100)
    else:
        for tensor in open_tensors(path).values():
            np.array(tensor.read())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of zipfile
@pytest.mark.parametrize("kind", MADE)
def test_a_damaged_file_is_loaded_or_refused(tmp_path, kind):
    random, path = Random(0), MADE[kind](tmp_path)
    content, errors = path.read_bytes(), []
    load(path)
    tracemalloc.start()
    for _ in range(ROUNDS):
        path.write_bytes(mutated(content, random))
        try:
            load(path)
        except UserError as error:
            errors.append(str(error))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(errors) > ROUNDS // 10
    assert all(error.isprintable() and len(error) < 1500 for error in errors)
    assert peak < 2**25
