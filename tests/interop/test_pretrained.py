"""Checkpoints in and out, against what transformers computes with them (tests/reference)."""

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.reference import REFERENCES, Arrays, Reference
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.interop import from_pretrained, save_pretrained, weights
from transformer_jax.interop.pretrained import FAMILIES
from transformer_jax.interop.tensors import open_tensors
from transformer_jax.interop.torch_bin import Tensor
from transformer_jax.interop.weights import parameters, weights_to_write
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    GPTConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    XLNet,
    XLNetConfig,
    make_model,
)

BARE = {"BertModel": "bert.", "RobertaModel": "roberta.", "DistilBertModel": "distilbert."}
BARE |= {"GPT2Model": "transformer.", "LlamaModel": "model.", "MarianModel": "model.", "XLNetModel": "transformer."}
"""The models without a head, and what the names of their tensors begin with in one that has a head."""

SAID_OTHERWISE = {
    ("bert_bfloat16", "dtype"): "float32",
    ("gpt2_model", "architectures"): ["GPT2LMHeadModel"],
    ("gpt2_untied", "n_inner"): 32,
    ("t5_model", "architectures"): ["T5ForConditionalGeneration"],
    ("t5_encoder", "num_decoder_layers"): 0,
    ("t5_encoder", "tie_word_embeddings"): False,
    ("t5_v1_1", "tie_word_embeddings"): False,
    **{(name, "activation_function"): "silu" for name in REFERENCES if name.startswith("marian")},
}
"""What we write into a config.json that says the same as what transformers wrote: mostly for its older versions."""

COMPUTED = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
MISSED = {"marian_model": {name.removeprefix("model.") for name in COMPUTED}}
"""What transformers computes, as we do. Of what has no head it says so."""

IGNORED = -100  # a label without a loss

each_reference = pytest.mark.parametrize("name", REFERENCES)


@cache
def loaded(name: str):
    return from_pretrained(REFERENCES[name].folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Callable[[str], Path]:
    @cache
    def export(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_pretrained(loaded(name).model, folder)
        return folder

    return export


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch").set_num_threads(1)
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


# Each model is run once: what takes the time is to compile it, and this way it takes half.
compiled = partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": False})

bert = compiled(Bert.__call__)
gpt = compiled(GPT.hidden)
pairs = {T5: compiled(T5.hidden), Transformer: compiled(Transformer.hidden)}
xlnet = compiled(XLNet.hidden_and_memory)

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
        return {"last_hidden_state": compiled(T5.encode)(model, source)}
    x = pairs[type(model)](model, source, reference.inputs["decoder_input_ids"])
    bare = reference.architecture in ("T5Model", "MarianModel")
    return {"last_hidden_state": x} if bare else {"logits": model.logits(x)}


def run_xlnet(model: XLNet, reference: Reference) -> dict[str, jax.Array]:
    def run(inputs: Arrays, memory: jax.Array | None = None):
        arguments = {"memory": memory}
        if "attention_mask" in inputs:
            arguments["valid"] = inputs["attention_mask"] == 1
        if "perm_mask" in inputs:
            arguments["allowed"] = inputs["perm_mask"] == 0
            arguments["places"] = inputs["target_mapping"].argmax(-1)
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


def assert_same_weights(first: nnx.Module, second: nnx.Module) -> None:
    ours, others = parameters(first), parameters(second)
    assert ours.keys() == others.keys()
    for path, parameter in ours.items():
        np.testing.assert_array_equal(parameter[...], others[path][...], path)


@each_reference
def test_a_forward_pass_is_that_of_transformers(name):
    assert_close(outputs(loaded(name).model, REFERENCES[name]), REFERENCES[name].outputs)


@each_reference
def test_what_was_loaded_is_saved_as_it_was(name, exported):
    reference, saved = REFERENCES[name], load_file(exported(name) / "model.safetensors")
    assert from_pretrained(exported(name)).config == loaded(name).config
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
    gradient = compiled(jax.grad(lambda model: loss(model, REFERENCES[name])))(model)
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
    model = jax.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == count


def changed(folder: Path, name: str, tensors: Arrays | None = None, **fields) -> Path:
    """A copy of a checkpoint with other tensors or fields; those that are None here are left out."""
    reference = REFERENCES[name]
    arrays = {name: tensor.read() for name, tensor in open_tensors(reference.folder).items()} | (tensors or {})
    save_file({name: array for name, array in arrays.items() if array is not None}, folder / "model.safetensors")
    kept = {field: value for field, value in reference.fields.items() if field not in fields}
    given = {field: value for field, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept | given))
    return folder


def assert_refused(message: str, call: Callable, *arguments) -> None:
    """The message is part of the one line that the error has."""
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*\\Z"):
        call(*arguments)


def tensor_of(name: str, tensor: str) -> np.ndarray:
    return open_tensors(REFERENCES[name].folder)[tensor].read()


def test_older_names_are_those_of_today():
    assert loaded("bert_old_names").config == loaded("bert_model").config
    assert_same_weights(loaded("bert_old_names").model, loaded("bert_model").model)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("gpt2_lm", {"transformer.h.0.attn.bias": np.tri(12), "transformer.h.1.attn.masked_bias": np.array(-1e4)}),
        ("gpt2_model", {"h.0.attn.bias": np.tri(12)}),
        ("llama_grouped", {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}),
        ("roberta_sequence_classification", {"roberta.pooler.dense.weight": np.ones((8, 8))}),
        ("t5_v1_0", {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((32, 2))}),
        ("distilbert_model", {"embeddings.position_ids": np.arange(12)[None]}),
    ],
)
def test_what_published_checkpoints_have_besides_is_left_out(tmp_path, name, tensors):
    assert_same_weights(from_pretrained(changed(tmp_path, name, tensors)).model, loaded(name).model)


@pytest.mark.parametrize(
    ("name", "original", "copy"),
    [
        ("gpt2_lm", "transformer.wte.weight", "lm_head.weight"),
        ("bert_masked_lm", "cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("distilbert_masked_lm", "distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
        ("t5_v1_0", "shared.weight", "encoder.embed_tokens.weight"),
        ("xlnet_lm", "transformer.word_embedding.weight", "lm_loss.weight"),
        ("marian_own_tables", "model.decoder.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_a_tied_tensor_may_have_either_name_or_both(tmp_path, name, original, copy):
    table = tensor_of(name, original)
    for folder, tensors in (("both", {copy: table}), ("one", {copy: table, original: None})):
        (tmp_path / folder).mkdir()
        again = from_pretrained(changed(tmp_path / folder, name, tensors))
        assert_same_weights(again.model, loaded(name).model)
    assert_refused(
        f"{copy} differs from {original}, but its config says that they are one",
        from_pretrained,
        changed(tmp_path, name, {copy: table + np.float32(1e-3)}),
    )


def test_a_t5_of_transformers_4_says_by_what_is_tied_whether_the_output_is_scaled(tmp_path):
    older = changed(tmp_path, "t5_v1_1", tie_word_embeddings=False, scale_decoder_outputs=None)
    assert from_pretrained(older).config == loaded("t5_v1_1").config
    assert not loaded("t5_v1_1").config.tie_embeddings and not loaded("t5_v1_1").config.scale_output
    older = changed(tmp_path, "t5_v1_0", scale_decoder_outputs=None)
    assert from_pretrained(older).config == loaded("t5_v1_0").config
    assert loaded("t5_v1_0").config.tie_embeddings and loaded("t5_v1_0").config.scale_output


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["llama_scaled", "llama_linear"])
def test_rotary_scaling_may_be_said_as_in_transformers_4(tmp_path, name, kind):
    rope = dict(REFERENCES[name].fields["rope_parameters"])
    base, scaling = rope.pop("rope_theta"), {kind: rope.pop("rope_type"), **rope}
    older = changed(tmp_path, name, rope_parameters=None, rope_theta=base, rope_scaling=scaling)
    assert from_pretrained(older).config == loaded(name).config


@pytest.mark.parametrize(("fields", "num_labels"), [({"num_labels": 5, "id2label": None}, 5), ({"id2label": None}, 2)])
def test_labels_are_counted_named_or_two(tmp_path, fields, num_labels):
    head = {"classifier.weight": np.ones((num_labels, 8), "f"), "classifier.bias": np.ones(num_labels, "f")}
    config = from_pretrained(changed(tmp_path, "bert_sequence_classification", head, **fields)).config
    assert config.num_labels == num_labels
    assert loaded("bert_sequence_classification").config.num_labels == 5


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("bert_pretraining", ("pooler", "masked_lm", "next_sentence")),
        ("bert_sequence_classification", ("pooler", "classifier")),
        ("bert_token_classification", ("tagger",)),
        ("bert_question_answering", ("span",)),
        ("roberta_sequence_classification", ("pooler", "classifier")),
        ("roberta_token_classification", ("tagger",)),
        ("distilbert_sequence_classification", ("pooler", "classifier")),
        ("distilbert_token_classification", ("tagger",)),
    ],
)
def test_heads_are_known_by_their_tensors_where_no_architecture_is_said(tmp_path, name, heads):
    assert from_pretrained(changed(tmp_path, name, architectures=None)).config.heads == heads
    assert loaded(name).config.heads == heads


@pytest.mark.parametrize(("name", "has_head"), [("xlnet_model", False), ("xlnet_lm", True)])
def test_an_xlnet_has_the_head_that_its_tensors_show(tmp_path, name, has_head):
    assert from_pretrained(changed(tmp_path, name, architectures=None)).config.lm_head == has_head
    assert loaded(name).config.lm_head == has_head


@pytest.mark.parametrize("name", ["gpt2_untied_model", "llama_model", "t5_model"])
def test_a_bare_model_has_hidden_states_alone(tmp_path, name):
    model = from_pretrained(changed(tmp_path, name, tie_word_embeddings=False)).model
    assert not model.config.lm_head and not hasattr(model, "output")
    assert_refused("has no output layer", model.logits, jnp.zeros((1, 1, model.config.d_model)))
    save_pretrained(model, tmp_path / "again")
    assert from_pretrained(tmp_path / "again").config == model.config


@pytest.mark.parametrize("name", ["gpt2_untied", "llama_grouped", "t5_v1_1"])
def test_a_model_that_says_it_has_a_head_must_have_it(tmp_path, name):
    lacks = changed(tmp_path, name, {"lm_head.weight": None}, tie_word_embeddings=False)
    assert_refused("lacks lm_head.weight, which its config asks for", from_pretrained, lacks)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type, transformers):
    config = transformers.AutoConfig.for_model(model_type)
    for field, value in FAMILIES[model_type].defaults.items():
        expected = getattr(config, field, value)
        if value is not None:  # or else it is made of others
            assert value == expected, field


def test_numbers_of_16_bits_become_float32():
    for path, parameter in parameters(loaded("bert_bfloat16").model).items():
        assert parameter.dtype == jnp.float32, path
    table = parameters(loaded("bert_bfloat16").model)["embedding.table"][...]
    assert np.array_equal(table.astype(jnp.bfloat16).astype(jnp.float32), table)
    assert not np.array_equal(table, loaded("bert_next_sentence").model.embedding.table[...])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "bert_masked_lm",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' cannot",
        ),
        ("bert_masked_lm", {"is_decoder": True}, "is_decoder=True cannot be loaded; it must be False"),
        ("bert_masked_lm", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bert_masked_lm", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("bert_masked_lm", {"hidden_act": "mish"}, "hidden_act='mish' is not known; it can be gelu, "),
        ("bert_masked_lm", {"num_attention_heads": 3}, "num_heads=3 does not divide d_model=8"),
        (
            "roberta_masked_lm",
            {"position_embedding_type": "relative_key_query"},
            "position_embedding_type='relative_key",
        ),
        ("distilbert_masked_lm", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True"),
        ("distilbert_masked_lm", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("distilbert_masked_lm", {"activation": "mish"}, "activation='mish' is not known"),
        ("gpt2_lm", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2_lm", {"scale_attn_weights": False}, "scale_attn_weights=False cannot be loaded; it must be True"),
        ("gpt2_lm", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2_lm", {"activation_function": "mish"}, "activation_function='mish' is not known"),
        ("llama_scaled", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' cannot be loaded; it must be"),
        ("llama_scaled", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic'"),
        ("llama_scaled", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama_scaled", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama_scaled", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama_scaled", {"hidden_act": "mish"}, "hidden_act='mish' is not known"),
        ("t5_v1_0", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='gated-mish' is not known; it can be relu"),
        ("t5_v1_0", {"relative_attention_num_buckets": 6}, "num_buckets=6 must be a multiple of 4"),
        ("xlnet_lm", {"attn_type": "both"}, "attn_type='both'"),
        ("xlnet_lm", {"bi_data": True}, "bi_data=True"),
        ("xlnet_lm", {"same_length": True}, "same_length=True"),
        ("xlnet_lm", {"untie_r": False}, "untie_r=False"),
        ("xlnet_lm", {"reuse_len": 3}, "reuse_len=3"),
        ("xlnet_lm", {"d_head": 5}, "d_head=5 cannot be loaded; it must be 4"),
        ("xlnet_lm", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("xlnet_lm", {"ff_activation": "mish"}, "ff_activation='mish' is not known"),
        ("marian_shared", {"decoder_attention_heads": 4}, "decoder_attention_heads=4 cannot be loaded; it must be 2"),
        ("marian_shared", {"decoder_ffn_dim": 9}, "decoder_ffn_dim=9"),
        ("marian_shared", {"tie_word_embeddings": False}, "an output layer of its own with shared embeddings"),
        ("marian_shared", {"activation_function": "mish"}, "activation_function='mish' is not known"),
        ("bert_model", {"model_type": "mamba"}, "config.json has model_type='mamba'; what can be loaded is bert, "),
        ("bert_model", {"model_type": ["bert"]}, "config.json has model_type=\\['bert'\\]; what can be loaded"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_an_error(tmp_path, name, fields, message):
    assert_refused(message, from_pretrained, changed(tmp_path, name, **fields))


@pytest.mark.parametrize(
    "name",
    [
        *("bert_model", "bert_masked_lm", "bert_old_names", "roberta_masked_lm", "distilbert_masked_lm", "gpt2_model"),
        *("gpt2_lm", "llama_grouped", "t5_v1_0", "xlnet_model", "xlnet_lm", "marian_shared"),
    ],
)
def test_a_kind_that_is_not_said_is_known_by_its_tensors(tmp_path, name):
    assert from_pretrained(changed(tmp_path, name, model_type=None)).config == loaded(name).config


def test_a_kind_that_is_neither_said_nor_known_is_an_error(tmp_path):
    nothing = dict.fromkeys(open_tensors(REFERENCES["bert_model"].folder))
    folder = changed(tmp_path, "bert_model", nothing | {"backbone.weight": np.ones(1)}, model_type=None)
    assert_refused("config.json has model_type=None; what can be loaded is bert, ", from_pretrained, folder)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"bert.encoder.layer.1.output.dense.bias": None},
            "lacks bert.encoder.layer.1.output.dense.bias, which its config asks for",
        ),
        (
            {f"bert.encoder.layer.0.attention.self.{part}.bias": None for part in ("query", "key", "value")}
            | {"bert.encoder.layer.0.attention.self.key.weight": None},
            r"lacks bert\S*.key.bias, bert\S*.key.weight, bert\S*.query.bias and 1 more, which",
        ),
        (
            {"bert.encoder.layer.2.output.dense.bias": np.ones(8)},
            "has bert.encoder.layer.2.output.dense.bias, for which its config has no place",
        ),
        ({"score.weight": np.ones(8)}, "has score.weight, for which"),
        (
            {"bert.embeddings.position_embeddings.weight": np.ones((10, 8), "f")},
            r"bert.embeddings.position_embeddings.weight has shape \(10, 8\), but its config asks for \(12, 8\)",
        ),
        (
            {"bert.encoder.layer.1.output.dense.weight": np.ones((12, 8), "f")},
            r"bert.encoder.layer.1.output.dense.weight has shape \(12, 8\), but its config asks for \(8, 12\)",
        ),
    ],
)
def test_every_tensor_has_its_place(tmp_path, tensors, message):
    folder = changed(tmp_path, "bert_masked_lm", tensors)
    assert_refused(f"{re.escape(str(folder))}.*{message}", from_pretrained, folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("gpt2_lm", "score.weight"), ("llama_grouped", "score.weight"), ("xlnet_lm", "logits_proj.bias")],
)
def test_a_head_that_is_not_known_is_called_by_its_name(tmp_path, name, tensor):
    assert_refused(f"has {tensor}, for which", from_pretrained, changed(tmp_path, name, {tensor: np.ones(8)}))


def test_the_positions_of_marian_are_its_sinusoids(tmp_path):
    table = "model.decoder.embed_positions.weight"
    angles = np.arange(12)[:, None] / 10_000 ** (np.arange(4) / 4)
    halved = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    for dtype in (np.float32, np.float16):
        again = from_pretrained(changed(tmp_path, "marian_shared", {table: halved.astype(dtype)}))
        assert_same_weights(again.model, loaded("marian_shared").model)
    interleaved = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(12, 8)
    for other in (interleaved, halved + 0.01, halved[:10]):
        folder = changed(tmp_path, "marian_shared", {table: other.astype(np.float32)})
        assert_refused(f"{table} is not what a model of its config computes there", from_pretrained, folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json; name the folder of a checkpoint of transformers"),
        (b"", "config.json cannot be read: Expecting value"),
        (b'{"model_type": "bert"', "config.json cannot be read: Expecting"),
        (b"\xff\xfe", "config.json cannot be read: .*decode"),
        (b'["bert"]', "config.json holds no JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(tmp_path, content, message):
    changed(tmp_path, "bert_model")
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert_refused(f"{re.escape(str(tmp_path))}.*{message}", from_pretrained, tmp_path)


def test_the_numbers_of_a_checkpoint_come_in_one_tensor_at_a_time(monkeypatch):
    """Arrays that were read are let go before the next is read; a copy and its original are in at once, before all."""
    read, alive, largest, reads = Tensor.read, {}, 0, []

    def watched(tensor: Tensor) -> np.ndarray:
        nonlocal largest
        array = np.array(read(tensor))  # which owns its numbers: whatever is made of them keeps it alive
        largest = max(largest, array.nbytes)
        alive[len(reads)] = array.nbytes
        weakref.finalize(array, alive.pop, len(reads))
        reads.append(sum(alive.values()))
        return array

    monkeypatch.setattr(Tensor, "read", watched)
    model = from_pretrained(REFERENCES["gpt2_sharded"].folder).model
    assert len(reads) > 20 and max(reads) == largest and not alive
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert largest < size / 4
    from_pretrained(REFERENCES["t5_bin"].folder)
    assert max(reads) == 2 * largest and not alive


EXPERTS = ExpertsConfig(4)
MARIAN = replace(TransformerConfig.base(), sinusoids="halved", norm_epsilon=1e-5, output_bias=True)
ROBERTA = replace(BertConfig.base(), position_start=2, pad_id=1, heads=("masked_lm",))
DISTILBERT = replace(BertConfig.base(), num_types=0, heads=("masked_lm",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TransformerConfig.base(), "sinusoids='interleaved' cannot be saved: .* Marian, has sinusoids='halved'"),
        (replace(MARIAN, norm="pre"), "norm='pre' cannot be saved"),
        (replace(MARIAN, norm_epsilon=1e-6), "norm_epsilon=1e-06"),
        (replace(MARIAN, positions="learned"), "positions='learned'"),
        (replace(MARIAN, position_start=1), "position_start=1"),
        (replace(MARIAN, experts=EXPERTS), "experts=.* has experts=None"),
        (replace(BertConfig.base(), heads=("masked_lm", "span")), "heads=.* are those of no Bert architecture"),
        (replace(BertConfig.base(), heads=("pooler",), pooler_activation="relu"), "pooler_activation='relu'"),
        (replace(ROBERTA, pad_id=0), "position_start=2 cannot be saved: .* Roberta, has position_start=1"),
        (replace(ROBERTA, num_types=0), "num_types=0"),
        (replace(ROBERTA, heads=("pooler", "next_sentence")), "of no Roberta architecture"),
        (replace(DISTILBERT, norm_epsilon=1e-5), "norm_epsilon=1e-05"),
        (replace(DISTILBERT, heads=("pooler",), pooler_activation="relu"), "of no DistilBert architecture"),
        (replace(DISTILBERT, heads=("pooler", "classifier"), num_labels=2), "pooler_activation='tanh'"),
        (replace(DISTILBERT, heads=("pooler", "next_sentence"), pooler_activation="relu"), "of no DistilBert arch"),
        (replace(GPTConfig.small(), gated=True), "gated=True cannot be saved: .* GPT-2, has gated=False"),
        (replace(GPTConfig.small(), norm="rms"), "norm='rms'"),
        (replace(GPTConfig.small(), attention_bias=False), "attention_bias=False"),
        (replace(GPTConfig.small(), feed_forward_bias=False), "feed_forward_bias=False"),
        (replace(GPTConfig.small(), num_key_heads=4), "num_key_heads=4"),
        (replace(GPTConfig.small(), head_size=32), "size_of_head=32"),
        (replace(GPTConfig.small(), experts=EXPERTS), "experts="),
        (replace(GPTConfig.llama(), gated=False), "gated=False cannot be saved: .* Llama, has gated=True"),
        (replace(GPTConfig.llama(), norm="layer"), "norm='layer'"),
        (replace(GPTConfig.llama(), experts=EXPERTS), "experts="),
        (replace(T5Config.small(), experts=EXPERTS), "experts="),
        (replace(T5Config.small(), activation="gelu", gated=True), "activation='gelu' with gated=True has no name"),
    ],
)
def test_a_model_that_transformers_cannot_hold_is_not_saved(tmp_path, config, message):
    assert_refused(message, save_pretrained, SimpleNamespace(config=config), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "config",
    [
        MARIAN,
        ROBERTA,
        DISTILBERT,
        replace(BertConfig.base(), heads=("pooler", "masked_lm")),
        replace(GPTConfig.small(), num_key_heads=12, head_size=64),
        replace(GPTConfig.llama(), num_key_heads=4),
        T5Config.base().v1_1(d_ff=2048),
        replace(T5Config.small(), scale_output=False),
        XLNetConfig.base(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_new_model_can_be_saved_and_loaded(tmp_path, config):
    """The smallest of this kind: one layer, and four features."""
    sizes = {"vocab_size": 9, "d_model": 4, "d_ff": 4, "num_heads": 2, "max_length": 8}
    sizes |= {"head_size": 2} if getattr(config, "head_size", None) else {}
    sizes |= {"num_key_heads": 2} if getattr(config, "num_key_heads", None) else {}
    sizes |= {field: 1 for field in vars(config) if field.startswith("num_") and field.endswith("_layers")}
    config = replace(config, **sizes)
    model = filled(config)
    save_pretrained(model, tmp_path)
    assert_same_weights(from_pretrained(tmp_path).model, model)


def filled(config):
    """A model with random weights, which are not drawn as its own would be: that takes longer to compile."""
    random, model = np.random.default_rng(0), jax.eval_shape(lambda: make_model(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), model)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_a_checkpoint_is_not_written_over(tmp_path):
    tokenizer = Tokenizer.train(["a b c"], TokenizerConfig(kind="characters"))
    save_pretrained(loaded("marian_shared").model, tmp_path, tokenizer=tokenizer)
    before = files(tmp_path)
    assert before.keys() == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    other = Tokenizer.train(["d e f"], TokenizerConfig(kind="characters"))
    with pytest.raises(UserError, match=r"already holds a model\.safetensors"):
        save_pretrained(loaded("gpt2_lm").model, tmp_path, tokenizer=other)
    assert files(tmp_path) == before


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(parts):
        raise OSError("no space left on device")

    monkeypatch.setattr(weights, "_joined", full)
    assert_refused("cannot be written to .*: no space left", save_pretrained, loaded("gpt2_lm").model, tmp_path / "new")
    assert files(tmp_path / "new") == {}


def test_a_config_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def stopped(path: Path, text: str, **_) -> None:
        path.write_bytes(text.encode()[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(loaded("gpt2_lm").model, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_large_model_is_saved_in_several_files(tmp_path):
    save_pretrained(loaded("gpt2_lm").model, tmp_path, shard_bytes=2000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_same_weights(from_pretrained(tmp_path).model, loaded("gpt2_lm").model)


def test_a_tokenizer_that_cannot_be_used_leaves_the_model(tmp_path):
    folder = changed(tmp_path, "gpt2_lm")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match="the tokenizer in .* is left out: .*cannot be read"):
        assert from_pretrained(folder).tokenizer is None
