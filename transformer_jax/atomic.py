"""Files and folders that are there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PREFIX = ".unfinished-"
"""How the temporary folders are called in which something is being written."""


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder to, which becomes `path` at the end; after an error nothing is left of it.

    It is in a new temporary folder beside `path`, so that nothing of anybody else is written over or removed.
    """
    try:
        with TemporaryDirectory(dir=path.parent, prefix=PREFIX) as folder:
            unfinished = Path(folder, path.name)
            yield unfinished
            unfinished.replace(path)
    except OSError as error:
        if PREFIX in str(error.filename):  # a name that tells the user nothing
            error.filename, error.filename2 = str(path), None
        raise
