"""GPT2ForSequenceClassification and GPT2ForTokenClassification, in and out."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.interop.checkpoints import assert_refused, assert_same_weights, changed
from transformer_jax import from_pretrained
from transformer_jax.interop.pretrained import save_pretrained
from transformer_jax.interop.tensors import open_tensors

SCORE = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
BIAS = np.array([1.0, -2.0, 0.5], np.float32)
LABELS = {"0": "bad", "1": "fair", "2": "good"}
CASES = {
    "classifier": ("GPT2ForSequenceClassification", {"score.weight": SCORE}, 0.0),
    "tagger": ("GPT2ForTokenClassification", {"classifier.weight": SCORE, "classifier.bias": BIAS}, 0.1),
}
IDS = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 0, 0]])
VALID = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    architecture, tensors, rate = CASES[request.param]
    (tmp_path / "theirs").mkdir()
    folder = changed(tmp_path / "theirs", "gpt2_model", tensors, architectures=[architecture], id2label=LABELS)
    return request.param, folder, rate


def test_a_checkpoint_with_a_head_is_loaded_and_given_back(case, tmp_path):
    head, folder, rate = case
    found = from_pretrained(folder)
    config = found.config
    assert (config.heads, config.num_labels, config.label_names) == ((head,), 3, ("bad", "fair", "good"))
    assert config.head_dropout_rate == rate
    save_pretrained(found.model, tmp_path / "ours")
    again = from_pretrained(tmp_path / "ours")
    assert again.config == config
    assert_same_weights(again.model, found.model)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == [CASES[head][0]] and written["id2label"] == LABELS
    tensors = open_tensors(tmp_path / "ours")
    for name, tensor in CASES[head][1].items():
        np.testing.assert_array_equal(tensors[name].read(), tensor)


def test_the_logits_are_those_of_the_tensors(case):
    head, folder, _ = case
    found = from_pretrained(folder)
    x = found.apply("hidden", IDS, valid=VALID)
    if head == "classifier":  # transformers takes the last token that is not padding
        np.testing.assert_allclose(
            found.apply("classify", x, VALID), np.asarray(x)[[0, 1], [4, 2]] @ SCORE.T, atol=1e-4
        )
    else:
        np.testing.assert_allclose(found.apply("tag", x), np.asarray(x) @ SCORE.T + BIAS, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "rate"), [({"classifier_dropout": 0.3}, 0.3), ({"hidden_dropout": 0.2}, 0.2), ({}, 0.1)]
)
def test_the_dropout_of_the_tagger_is_what_transformers_would_take(tmp_path, fields, rate):
    architecture, tensors, _ = CASES["tagger"]
    folder = changed(tmp_path, "gpt2_model", tensors, architectures=[architecture], id2label=LABELS, **fields)
    assert from_pretrained(folder).config.head_dropout_rate == rate


def test_what_no_architecture_holds_is_refused(tmp_path):
    architecture, tensors, _ = CASES["classifier"]
    folder = changed(tmp_path, "gpt2_model", tensors, architectures=[architecture], id2label=LABELS)
    config = from_pretrained(folder).config
    for changes, message in (
        ({"heads": ("classifier", "tagger")}, "are those of no GPT-2 architecture"),
        ({"head_dropout_rate": 0.1}, "head_dropout_rate=0.1 cannot be saved"),
        ({"tie_embeddings": False, "lm_head": True}, "set lm_head=False"),
        ({"positions": "rotary", "norm": "rms", "gated": True}, r"heads=\('classifier',\) cannot be saved"),
    ):
        model = jax.eval_shape(lambda changes=changes: replace(config, **changes).build(nnx.Rngs(0)))
        assert_refused(message, save_pretrained, model, tmp_path / "again")
