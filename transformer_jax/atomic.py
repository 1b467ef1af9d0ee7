"""Paths on this machine and in buckets, and files and folders that are there whole or not at all."""

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

from transformer_jax.errors import UserError

PREFIX = ".unfinished-"
"""How the temporary folders are called in which something is being written."""

PACKAGE = "gcsfs"
"""What reads and writes gs://."""


def as_path(path: str | PurePath) -> Path:
    """A path on this machine, or, for gs://bucket/name, one in a bucket.

    That one is an `epath.Path`, which has the methods of pathlib's. pathlib itself would make gs:/bucket/name of it,
    from which the whole text is found again here.
    """
    match = re.match(r"(gs|s3):/+(?=[^/])", text := os.fspath(path))
    if match is None:
        return Path(path)
    address = f"{match[1]}://{text[match.end() :]}"
    if match[1] != "gs":
        raise UserError(
            f"{address}: checkpoints can be written to folders and to gs:// only; mount the bucket as a folder, and "
            "name that"
        )
    if not any(map(find_spec, (PACKAGE, "tensorflow"))):
        raise UserError(f'{address} needs the package {PACKAGE}: pip install "transformer_jax[remote]"')
    from etils import epath  # which is not needed on this machine

    return epath.Path(address)


def is_remote(path: PurePath) -> bool:
    """Whether a path that `as_path` has made is in a bucket."""
    return not isinstance(path, Path)


def cache_folder(*key: str) -> Path:
    """A folder on this machine for what can be made again, its own for each key."""
    root = os.environ.get("XDG_CACHE_HOME")
    name = hashlib.sha256("\n".join(key).encode(errors="surrogateescape")).hexdigest()[:16]
    return (Path(root) if root else Path.home() / ".cache") / "transformer_jax" / name


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which becomes `path` at the end; after an error nothing is left of it.

    It is in a new temporary folder beside `path`, so that nothing of anybody else is written over or removed. What is
    to be a file in a bucket is written on this machine first.
    """
    if is_remote(path):
        with TemporaryDirectory(prefix=PREFIX) as folder:
            unfinished = Path(folder, path.name)
            yield unfinished
            upload(unfinished, path)
        return
    try:
        with TemporaryDirectory(dir=path.parent, prefix=PREFIX) as folder:
            unfinished = Path(folder, path.name)
            yield unfinished
            unfinished.replace(path)
    except OSError as error:
        if PREFIX in str(error.filename):  # a name that tells the user nothing
            error.filename, error.filename2 = str(path), None
        raise


def upload(source: Path, path: Path) -> None:
    """Copy a file of this machine to a bucket, under a temporary name first."""
    if source.is_dir():
        raise UserError(f"{path} would be a folder in a bucket, which cannot be written all or nothing")
    unfinished = path.parent / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        unfinished.write_bytes(source.read_bytes())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def local_copy(folder: Path) -> Iterator[Path]:
    """A folder itself, or, of one in a bucket, a temporary folder with copies of the files that are directly in it."""
    if not is_remote(folder):
        yield folder
        return
    with TemporaryDirectory(prefix=PREFIX) as temporary:
        for path in folder.iterdir():
            if path.is_file():
                Path(temporary, path.name).write_bytes(path.read_bytes())
        yield Path(temporary)
