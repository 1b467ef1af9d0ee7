"""`transformer-jax checkpoints`, on checkpoints whose numbers are known."""

import json
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from transformer_jax.commands.checkpoints import Average, Diff, List, Prune, Show
from transformer_jax.commands.errors import user_errors
from transformer_jax.commands.parsing import parse
from transformer_jax.data import Dates
from transformer_jax.tasks import BestCheckpoint
from transformer_jax.training import Config, Run, load_arrays
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.workdir import Workdir

EXACT_MATCH = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.4}
"""Of the task's own metric, step 2 has the best."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with four checkpoints, of which the parameters are those of the first step, times the step."""
    path = tmp_path_factory.mktemp("runs") / "run"
    data = Dates(train_size=50, valid_size=5, test_size=5)
    model = replace(tiny.CONFIG, vocab_size=None, pad_id=None)
    return path, Run.begin(Config(model=model, data=data, steps=9, workdir=path))


@pytest.fixture
def run(trained, tmp_path):
    path, run = trained
    copy = tmp_path / "run"
    shutil.copytree(path, copy)
    state = run.initial_state()
    checkpoints = Checkpoints(copy / "checkpoints", keep=9)
    metrics = MetricsLog(Workdir(copy), 0)
    for step, value in EXACT_MATCH.items():
        model = jax.tree.map(lambda x, step=step: x * step, state.model)
        checkpoints.save(replace(state, step=jnp.int32(step), model=model))
        metrics.write(step, "valid", {"loss": value, "exact_match": value})
    checkpoints.close()
    metrics.close()
    return copy


@pytest.fixture
def command(capsys):
    def call(kind, *arguments):
        try:
            with user_errors():
                parse(kind, list(map(str, arguments)), prog="checkpoints").run()
            code = 0
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_steps_are_listed(run, command):
    assert command(List, run) == (0, "1\n2\n3\n4\n", "")
    _, out, _ = command(List, run, "--long")
    header, *lines = out.splitlines()
    assert header.split() == ["step", "size", "saved", "valid"]
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "2").rglob("*") if path.is_file())
    found = re.fullmatch(r" +2 +([\d.]+) (kB|MB)  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)", lines[1])
    assert float(found[1]) * {"kB": 1e3, "MB": 1e6}[found[2]] == pytest.approx(size, rel=1e-3)
    assert found[3] == "loss 0.9000, exact match 90.00%"


def test_arrays_are_shown(run, command):
    code, out, _ = command(Show, run, "--step", 3, "--json")
    shown, arrays = json.loads(out), load_arrays(run, 3)
    assert (code, shown["step"]) == (0, 3)
    assert shown["parameters"] == sum(array.size for array in arrays.values())
    assert [one["name"] for one in shown["arrays"]] == list(arrays)
    for one in shown["arrays"]:
        array = arrays[one["name"]]
        assert (tuple(one["shape"]), one["dtype"], one["bytes"]) == (array.shape, "float32", 4 * array.size)
        total = sum(map(float, array.flat))
        deviation = (sum((float(x) - total / array.size) ** 2 for x in array.flat) / array.size) ** 0.5
        expected = (total / array.size, deviation, min(array.flat), max(array.flat))
        assert (one["mean"], one["std"], one["min"], one["max"]) == pytest.approx(expected, abs=1e-9)
    _, out, _ = command(Show, run / "checkpoints")
    lines = out.splitlines()
    assert lines[0].split() == ["name", "shape", "dtype", "parameters", "bytes", "mean", "std", "min", "max"]
    assert [line.split()[0] for line in lines[1:-1]] == list(arrays)
    assert lines[-1].startswith(f"step 4: {shown['parameters']:,} parameters in {len(arrays)} arrays, ")


def test_equal_checkpoints_end_with_zero(run, command, tmp_path):
    code, out, _ = command(Diff, run, run / "checkpoints", "--step-b", 4)
    assert code == 0 and out.endswith(f"all {len(load_arrays(run))} arrays are equal bit for bit\n")


def saved(folder, **arrays):
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save_model({name: jnp.asarray(array) for name, array in arrays.items()}, 1)
    checkpoints.close()
    return folder


def test_differences_are_named(tmp_path, command):
    a = {"same": [1.0], "near": [4.0, 0.0], "shape": [1.0], "bits": [0.0], "type": np.float32([1.5]), "mine": [1.0]}
    b = {"same": [1.0], "near": [5.0, 0.0], "shape": [[1.0]], "bits": [-0.0], "type": np.float16([1.5]), "yours": [1.0]}
    code, out, _ = command(Diff, saved(tmp_path / "a", **a), saved(tmp_path / "b", **b))
    assert code == 1
    assert set(out.splitlines()) == {
        f"A: {tmp_path / 'a'}, step 1",
        f"B: {tmp_path / 'b'}, step 1",
        "mine: only in A",
        "yours: only in B",
        "shape: the shape is (1,) in A and (1, 1) in B",
        "near: largest difference 1, relative 0.2",
        "bits: largest difference 0, relative 0",
        "type: the type is float32 in A and float16 in B; largest difference 0, relative 0",
    }
    code, out, err = command(Diff, tmp_path / "a", tmp_path / "b", "--step-b", 7)
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path / 'b' / 'checkpoints'} has no checkpoint of step 7; there are: 1\n"


def test_the_newest_and_the_best_are_left(run, trained, command, monkeypatch):
    monkeypatch.setattr(type(trained[1].task), "best", BestCheckpoint("exact_match", "highest"))
    assert command(Prune, run, "--keep", 1, "--dry-run")[1] == "would be removed: 1, 3; kept: 2, 4\n"
    assert command(List, run)[1] == "1\n2\n3\n4\n"
    assert command(Prune, run, "--keep", 2) == (0, "removed: 1; kept: 2, 3, 4\n", "")
    assert command(List, run)[1] == "2\n3\n4\n"
    assert command(Prune, run, "--keep", 3) == (0, "removed: none; kept: 2, 3, 4\n", "")
    code, _, err = command(Prune, run, "--keep", 0)
    assert (code, err) == (1, "error: keep must be at least 1; got 0\n")


def test_nothing_is_removed_while_a_training_goes_on(run, command):
    with locked(run):
        code, _, err = command(Prune, run, "--keep", 1)
    assert code == 1 and "is in use: process" in err
    assert command(List, run)[1] == "1\n2\n3\n4\n"


def test_the_mean_is_that_of_the_arrays(run, command, tmp_path):
    code, out, _ = command(Average, run, tmp_path / "mean", "--last", 3)
    assert (code, out) == (0, f"{tmp_path / 'mean'} is the mean of the steps 2, 3, 4\n")
    once, mean = load_arrays(run, 1), load_arrays(tmp_path / "mean")
    assert once.keys() == mean.keys()
    for name in once:
        np.testing.assert_allclose(mean[name], 3 * once[name], rtol=1e-6)
