"""Checkpoints in and out, against what transformers computes with them (tests/reference)."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.interop.checkpoints import loaded
from tests.reference import REFERENCES, Arrays, Reference
from transformer_jax.functional import cross_entropy
from transformer_jax.interop import from_pretrained, save_pretrained
from transformer_jax.interop.pretrained import FAMILIES
from transformer_jax.interop.tensors import open_tensors
from transformer_jax.interop.weights import weights_to_write
from transformer_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    GPTConfig,
    T5Config,
    Transformer,
    XLNet,
    XLNetConfig,
)

BARE = {"BertModel": "bert.", "RobertaModel": "roberta.", "DistilBertModel": "distilbert."}
BARE |= {"GPT2Model": "transformer.", "LlamaModel": "model.", "MarianModel": "model.", "XLNetModel": "transformer."}
BARE |= {"PegasusModel": "model."}
"""The models without a head, and what the names of their tensors begin with in one that has a head."""

SAID_OTHERWISE = {
    ("bert_bfloat16", "dtype"): "float32",
    ("gpt2_model", "architectures"): ["GPT2LMHeadModel"],
    ("gpt2_untied", "n_inner"): 32,
    ("marian_model", "architectures"): ["MarianMTModel"],
    ("pegasus_model", "architectures"): ["PegasusForConditionalGeneration"],
    ("t5_model", "architectures"): ["T5ForConditionalGeneration"],
    ("t5_encoder", "num_decoder_layers"): 0,
    ("t5_encoder", "tie_word_embeddings"): False,
    ("t5_v1_1", "tie_word_embeddings"): False,
    **{(name, "activation_function"): "silu" for name in REFERENCES if name.startswith("marian")},
    # An id outside the vocabulary is ignored.
    **{(name, f"{which}_token_id"): None for name in REFERENCES for which in ("bos", "eos") if name.startswith("gpt2")},
}
"""What we write into a config.json that says the same as what transformers wrote: mostly for its older versions."""

COMPUTED = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
MISSED = {"marian_model": {name.removeprefix("model.") for name in COMPUTED}}
"""What transformers computes, as we do. Of what has no head it says so."""

IGNORED = -100  # a label without a loss

each_reference = pytest.mark.parametrize("name", REFERENCES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[[str], Path]:
    @cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_pretrained(loaded(name).model, folder, special_ids=loaded(name).special_ids)
        return folder

    return export


bert = jax.jit(Bert.__call__)
gpt = jax.jit(GPT.hidden)
pairs = {T5: jax.jit(T5.hidden), Transformer: jax.jit(Transformer.hidden)}
xlnet = jax.jit(XLNet.hidden_and_memory)

BERT_HEADS = {
    "Model": {"last_hidden_state": lambda model, x: x, "pooler_output": Bert.pool},
    "ForPreTraining": {"prediction_logits": Bert.masked_lm, "seq_relationship_logits": Bert.next_sentence},
    "ForMaskedLM": {"logits": Bert.masked_lm},
    "ForNextSentencePrediction": {"logits": Bert.next_sentence},
    "ForSequenceClassification": {"logits": Bert.classify},
    "ForTokenClassification": {"logits": Bert.tag},
    "ForQuestionAnswering": {
        "start_logits": lambda model, x: model.span(x)[..., 0],
        "end_logits": lambda model, x: model.span(x)[..., 1],
    },
}


def outputs(model, reference: Reference) -> Arrays:
    """What our model gives for the inputs of a reference, by the names that transformers has for it."""
    run = {Bert: run_bert, GPT: run_gpt, T5: run_pairs, Transformer: run_pairs, XLNet: run_xlnet}[type(model)]
    return {name: np.asarray(array) for name, array in run(model, reference).items()}


def run_bert(model: Bert, reference: Reference) -> dict[str, jax.Array]:
    inputs = reference.inputs
    x = bert(model, inputs["input_ids"], inputs.get("token_type_ids"), valid=inputs["attention_mask"] == 1)
    heads = BERT_HEADS[re.sub("^(Bert|Roberta|DistilBert)", "", reference.architecture)]
    return {name: head(model, x) for name, head in heads.items() if name in reference.outputs}


def run_gpt(model: GPT, reference: Reference) -> dict[str, jax.Array]:
    x = gpt(model, reference.inputs["input_ids"], valid=reference.inputs["attention_mask"] == 1)
    return {"last_hidden_state": x} if reference.architecture in BARE else {"logits": model.logits(x)}


def run_pairs(model: T5 | Transformer, reference: Reference) -> dict[str, jax.Array]:
    source = reference.inputs["input_ids"]
    if reference.architecture == "T5EncoderModel":
        return {"last_hidden_state": jax.jit(T5.encode)(model, source)}
    x = pairs[type(model)](model, source, reference.inputs["decoder_input_ids"])
    bare = reference.architecture in ("T5Model", "MarianModel", "PegasusModel")
    return {"last_hidden_state": x} if bare else {"logits": model.logits(x)}


def run_xlnet(model: XLNet, reference: Reference) -> dict[str, jax.Array]:
    def run(inputs: Arrays, memory: jax.Array | None = None):
        arguments = {"memory": memory}
        if "attention_mask" in inputs:
            arguments["valid"] = inputs["attention_mask"] == 1
        if "perm_mask" in inputs:
            arguments["allowed"] = inputs["perm_mask"] == 0
            arguments["target_positions"] = inputs["target_mapping"].argmax(-1)
        return xlnet(model, inputs["input_ids"], inputs["token_type_ids"], **arguments)

    memory = run(reference.before)[1] if reference.before else None
    x, memory = run(reference.inputs, memory)
    if reference.architecture == "XLNetModel":
        return {"last_hidden_state": x}
    results = {"logits": model.logits(x), "mems": jnp.swapaxes(memory, 1, 2)}
    return {name: results[name] for name in reference.outputs}


def assert_close(actual: Arrays, expected: Arrays, tolerance: float = 1e-5) -> None:
    """The same arrays, with errors that are small beside the largest number of each."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].shape == array.shape, name
        error = np.abs(actual[name] - array).max() / np.abs(array).max()
        assert error < tolerance, f"{name} is off by {error:.1e}"


@each_reference
def test_a_forward_pass_is_that_of_transformers(name):
    assert_close(outputs(loaded(name).model, REFERENCES[name]), REFERENCES[name].outputs)


@each_reference
def test_what_was_loaded_is_saved_as_it_was(name, exported):
    reference, saved = REFERENCES[name], load_file(exported(name) / "model.safetensors")
    again = from_pretrained(exported(name))
    assert again.config == loaded(name).config and again.special_ids == loaded(name).special_ids
    fields = json.loads((exported(name) / "config.json").read_text())
    assert fields["dtype"] == "float32"
    for field in fields.keys() & reference.fields.keys():
        assert fields[field] == SAID_OTHERWISE.get((name, field), reference.fields[field]), field
    if name == "bert_old_names":
        return
    prefix = BARE.get(reference.architecture, "")
    original = {
        f"{prefix}{name}": tensor.read().astype(np.float32) for name, tensor in open_tensors(reference.folder).items()
    }
    assert saved.keys() <= original.keys()
    for tensor, array in saved.items():
        np.testing.assert_array_equal(array, original[tensor], tensor)
    for tensor in original.keys() - saved.keys() - COMPUTED:
        assert any(np.array_equal(original[tensor], array) for array in saved.values()), f"{tensor} is lost"


@each_reference
def test_transformers_loads_what_was_saved(name, exported, transformers):
    from tests.reference.make import array, run

    reference = REFERENCES[name]
    architecture = getattr(transformers, reference.architecture)
    original = architecture.from_pretrained(reference.folder, dtype="float32").eval()
    again, report = architecture.from_pretrained(exported(name), output_loading_info=True)
    assert {kind: names for kind, names in report.items() if names} in ({}, {"missing_keys": MISSED.get(name)})

    def computed(model) -> Arrays:
        output = run(model, reference.inputs, reference.before)
        return {name: array(getattr(output, name)) for name in reference.outputs}

    expected, found = computed(original), computed(again.eval())
    assert_close(expected, reference.outputs)
    for output in expected:
        np.testing.assert_array_equal(found[output], expected[output], output)


def loss(model: Bert | GPT, reference: Reference) -> jax.Array:
    """The mean over the tokens that have a label; for GPT, that of a token is for the one before."""
    labels = reference.labels
    if isinstance(model, Bert):
        logits = model.masked_lm(
            model(
                reference.inputs["input_ids"],
                reference.inputs["token_type_ids"],
                valid=reference.inputs["attention_mask"] == 1,
            )
        )
    else:
        logits = model(reference.inputs["input_ids"], valid=reference.inputs["attention_mask"] == 1)[:, :-1]
        labels = labels[:, 1:]
    total, weight = cross_entropy(logits, np.maximum(labels, 0), jnp.asarray(labels != IGNORED))
    return total / weight


@cache
def gradients(name: str) -> Arrays:
    """Of our loss, by the names that their weights have in a checkpoint."""
    model, family = loaded(name).model, FAMILIES[REFERENCES[name].fields["model_type"]]
    gradient = jax.jit(jax.grad(lambda model: loss(model, REFERENCES[name])))(model)
    tensors = weights_to_write(gradient, family.names(model.config))
    return {name: tensor.read() for name, tensor in tensors.items()}


def assert_same_gradients(actual: Arrays, expected: Arrays) -> None:
    """Within 1e-5 of the largest of each tensor, or of a hundredth of all where that is nothing but rounding."""
    assert actual.keys() == expected.keys()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(np.abs(gradient).max(), 1e-2 * largest)
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("name", ["bert_masked_lm", "gpt2_lm"])
def test_the_gradients_of_all_weights_are_those_of_torch(name):
    assert_same_gradients(gradients(name), REFERENCES[name].gradients)


@pytest.mark.parametrize("name", ["bert_masked_lm", "gpt2_lm"])
def test_the_gradients_of_all_weights_are_those_of_torch_here(name, transformers):
    from tests.reference.make import gradients as gradients_of_torch

    reference = REFERENCES[name]
    model = getattr(transformers, reference.architecture).from_pretrained(reference.folder).eval()
    assert_same_gradients(gradients(name), gradients_of_torch(model, reference.inputs, reference.labels))


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (replace(BertConfig.base(), heads=("pooler",)), 109_482_240),
        (replace(BertConfig.large(), heads=("pooler",)), 335_141_888),
        (GPTConfig.small(), 124_439_808),
        (GPTConfig.medium(), 354_823_168),
        (GPTConfig.large(), 774_030_080),
        (GPTConfig.xl(), 1_557_611_200),
        (GPTConfig.llama(), 6_738_415_616),
        (T5Config.small(), 60_506_624),
        (T5Config.base(), 222_903_552),
        (replace(XLNetConfig.base(), lm_head=False), 116_718_336),
    ],
    ids=lambda value: f"{value:,}" if isinstance(value, int) else "",
)
def test_published_models_have_as_many_parameters(config, count):
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == count
