"""`convert`: a run as transformers reads it, and back."""

import json
import os
import sys

import jax
import numpy as np
import pytest

import train
from tests.test_configs import ROOT, TEXT, TINY
from transformer_jax import from_pretrained
from transformer_jax.__main__ import main
from transformer_jax.training import Run
from transformer_jax.training import train as run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    (folder / "a.txt").write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    flags = [*TINY, *TEXT, "--model.num-layers", "2", "--data.train", str(folder / "a.txt")]
    run_training(train.parse([str(ROOT / "configs" / "gpt_text.py"), *flags, "--workdir", str(folder / "run")]))
    return folder / "run"


@pytest.fixture
def command(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["transformer_jax", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return stop.code, capsys.readouterr()
        return 0, capsys.readouterr()

    return command


def test_out_and_back_are_the_same_weights_and_the_same_text(run, tmp_path, command, monkeypatch):
    assert command("convert", run, tmp_path / "hf")[0] == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert command("convert", tmp_path / "hf", tmp_path / "back")[0] == 0
    first, second = (Run.open(path).restored_model()[0] for path in (run, tmp_path / "back"))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
    loaded = from_pretrained(tmp_path / "hf")
    assert loaded.tokenizer.encode(["the mat"]) == Run.open(run).task.tokenizer.encode(["the mat"])

    def generated(path):
        read, write = os.pipe()
        os.write(write, b"the cat\n")
        os.close(write)
        with os.fdopen(read) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stream)
            return command("generate", path, "--temperature", 0, "--new-tokens", 5)

    code, (out, error) = generated(tmp_path / "back")
    assert code == 0 and out.count("\n") == 1, error


def test_what_is_there_is_not_overwritten(run, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    code, output = command("convert", run, tmp_path)
    assert code == 1 and output.err == f"error: {tmp_path} exists already; give another folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_without_a_tokenizer_says_how_to_give_one(run, tmp_path, command):
    command("convert", run, tmp_path / "hf")
    tokenizer = (tmp_path / "hf" / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    code, output = command("convert", tmp_path / "hf", tmp_path / "back")
    assert code == 1 and "give one with --tokenizer" in output.err and output.err.count("\n") == 1
    assert not (tmp_path / "back").exists()
    assert command("convert", tmp_path / "hf", tmp_path / "back", "--tokenizer", tokenizer)[0] == 0


def test_what_is_neither_is_named(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    for source, message in ((tmp_path, "what can be loaded is"), (tmp_path / "none at all", "is no folder")):
        code, output = command("convert", source, tmp_path / "out")
        assert code == 1 and message in output.err and output.err.count("\n") == 1
