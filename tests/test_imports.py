"""What importing costs, and which way imports point."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "transformer_jax"
LOWER = {
    "functional": set(),
    "parallel": set(),
    "layers": {"functional", "parallel"},
    "models": {"functional", "parallel", "layers"},
    "decoding": {"functional"},
    "data": set(),
    "tasks": {"functional", "parallel", "models", "decoding", "data"},
    "training": {"functional", "parallel", "layers", "models", "decoding", "data", "tasks", "interop"},
    "visualize": set(),
    "interop": {"functional", "parallel", "layers", "models", "data"},
}

OFFERED = {"parallel": {"training"}}
"""What a folder offers though it is above it, and imports in a function: `parallel.verify` runs a whole config."""


def imported(folder):
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                of_package = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from of_package if node.module == "transformer_jax" else [node.module]


@pytest.mark.parametrize("folder", LOWER)
def test_imports_point_down_the_house(folder):
    ours = {name.split(".")[1] for name in imported(folder) if name.startswith("transformer_jax.")}
    assert ours <= {*LOWER[folder], *OFFERED.get(folder, ()), folder, "errors", "atomic"}


def test_the_functional_core_imports_nothing_but_jax():
    others = {name.split(".")[0] for name in imported("functional")} - sys.stdlib_module_names
    assert others == {"jax", "jaxtyping", "transformer_jax"}
    assert "errors" not in {
        name.split(".")[1] for name in imported("functional") if name.startswith("transformer_jax.")
    }


def test_importing_brings_no_tensorflow_and_no_matplotlib():
    code = "import transformer_jax, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in result.stdout.split()}
    assert not modules & {"tensorflow", "tensorflow_datasets", "matplotlib", "torch"}
