"""`convert`: a run as transformers reads it, and back."""

import json
import os
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.interop.checkpoints import changed
from tests.test_configs import ROOT, TEXT, TINY
from transformer_jax import from_pretrained, save_pretrained
from transformer_jax.__main__ import _main as main
from transformer_jax.commands.train import parse_config
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.interop import SpecialIds
from transformer_jax.interop.tokenizers import save_tokenizer
from transformer_jax.models import Transformer, TransformerConfig
from transformer_jax.training import Run
from transformer_jax.training import train as run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    (folder / "a.txt").write_text("the cat sat on the mat. " * 40, encoding="utf-8")
    flags = [*TINY, *TEXT, "--model.num-layers", "2", "--data.train", str(folder / "a.txt")]
    arguments = [str(ROOT / "configs" / "gpt_text.py"), *flags, "--workdir", str(folder / "run")]
    run_training(parse_config(arguments, "train.py"))
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
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
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

    (code, (out, error)), (_, (original, _)) = generated(tmp_path / "back"), generated(run)
    assert code == 0 and out.count("\n") == 1, error
    assert out == original


def test_special_ids_go_out_and_come_back(run, tmp_path, command):
    command("convert", run, tmp_path / "hf")
    ours = Run.open(run).task.tokenizer
    expected = SpecialIds(ours.begin_id, (ours.end_id,), ours.pad_id)
    assert from_pretrained(tmp_path / "hf").special_ids == expected
    fields = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert fields == {"bos_token_id": ours.begin_id, "eos_token_id": ours.end_id, "pad_token_id": ours.pad_id}
    # What generation_config.json says comes before what the names of the tokens say.
    other = ours.find("a")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, ours.begin_id]}))
    assert command("convert", tmp_path / "hf", tmp_path / "back")[0] == 0
    theirs = Run.open(tmp_path / "back").task.tokenizer
    assert (theirs.begin_id, theirs.end_id, theirs.pad_id) == (ours.begin_id, other, ours.pad_id)
    assert command("convert", tmp_path / "back", tmp_path / "again")[0] == 0
    assert from_pretrained(tmp_path / "again").special_ids == replace(expected, end=(other,))


def test_a_translator_keeps_what_its_targets_begin_with(tmp_path, command):
    tokenizer = Tokenizer.train(["a b c d e f g h"], TokenizerConfig(kind="characters"))
    config = replace(TransformerConfig.base(vocab_size=tokenizer.vocab_size), pad_id=tokenizer.pad_id)
    small = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = Transformer(replace(config, **small, norm="pre", norm_epsilon=1e-5), rngs=nnx.Rngs(0))
    for start in (tokenizer.begin_id, tokenizer.pad_id, tokenizer.end_id):
        folder = tmp_path / str(start)
        special = SpecialIds(tokenizer.begin_id, (tokenizer.end_id,), tokenizer.pad_id, start)
        save_pretrained(model, folder / "hf", tokenizer=tokenizer, special_ids=special)
        assert command("convert", folder / "hf", folder / "run")[0] == 0
        assert Run.open(folder / "run").task.start_id == start
        assert command("convert", folder / "run", folder / "again")[0] == 0
        assert from_pretrained(folder / "again").special_ids.decoder_start == start


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_start_token_id": 1}, "decoder_start_token_id=1, but a T5 here begins its targets with its padding"),
        ({"forced_bos_token_id": 1}, "forced_bos_token_id=1 would not be honoured by a run"),
        ({"eos_token_id": 39}, "the checkpoint's end id is 39, but its tokenizer has no token with that id"),
    ],
)
def test_what_a_run_would_not_honour_is_an_error(tmp_path, command, fields, message):
    tokenizer = Tokenizer.train(["a b c"], TokenizerConfig(kind="characters"))
    (tmp_path / "hf").mkdir()
    changed(
        tmp_path / "hf", "t5_v1_0", **{"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.end_id, **fields}
    )
    save_tokenizer(tokenizer, tmp_path / "hf")
    code, output = command("convert", tmp_path / "hf", tmp_path / "run")
    assert code == 1 and message in output.err and output.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


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
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    code, output = command("convert", tmp_path / "hf", tmp_path / "back", "--tokenizer", tokenizer)
    assert code == 0 and output.err.startswith("note: the tokenizer in ") and output.err.count("\n") == 1


def test_what_is_neither_is_named(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    for source, message in ((tmp_path, "what can be loaded is"), (tmp_path / "none at all", "is not a folder")):
        code, output = command("convert", source, tmp_path / "out")
        assert code == 1 and message in output.err and output.err.count("\n") == 1
