"""Every notebook runs from its source, and the executed one beside it is of this source."""

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))
assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_at_a_tiny_size(path, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_WORKDIR", str(tmp_path / "run"))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    notebook = jupytext.read(path)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_executed_notebook_is_of_this_source(path):
    source, executed = jupytext.read(path), jupytext.read(path.with_suffix(".ipynb"))
    assert [(c.cell_type, c.source) for c in executed.cells] == [(c.cell_type, c.source) for c in source.cells]
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
