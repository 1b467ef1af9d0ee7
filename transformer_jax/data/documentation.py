"""The documentation that comes with Python: real text on every machine."""

import ast
import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from transformer_jax.errors import UserError

# Tests, what is installed beside the library, tables, a program, and what later versions of Python no longer have.
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "encodings", "idlelib", "distutils", "lib2to3"}


@cache
def python_documentation() -> tuple[tuple[str, str], ...]:
    """The name and the docstrings of each module of the standard library that has any, without importing it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(_modules(library)):
        try:
            text = "\n\n".join(_docstrings(ast.parse(path.read_bytes())))
        except (SyntaxError, ValueError):
            continue
        if text:
            name = ".".join(path.relative_to(library).with_suffix("").parts)
            documents.append((name.removesuffix(".__init__"), text))
    if not documents:
        raise UserError(f"there is no Python source in {library} to take documentation from; name train files")
    return tuple(documents)


def _modules(library: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of a module, class or function and of what is in it, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstrings(child)
