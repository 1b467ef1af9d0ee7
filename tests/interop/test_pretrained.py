"""What checkpoints may be like, and what is an error."""

import json
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.checkpoints import assert_refused, assert_same_weights, changed, loaded, tensor_of
from tests.reference import REFERENCES
from transformer_jax.interop import from_pretrained, save_pretrained
from transformer_jax.interop.fields import REQUIRED
from transformer_jax.interop.pretrained import FAMILIES
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.tensors import open_tensors
from transformer_jax.layers import named_parameters


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
    assert not config.label_names and not loaded("bert_sequence_classification").config.label_names


@pytest.mark.parametrize("name", ["bert_token_classification", "distilbert_sequence_classification"])
def test_the_names_of_labels_are_kept(tmp_path, name):
    names = {str(label): f"a{label}é" for label in range(loaded(name).config.num_labels)}
    backwards = dict(reversed(names.items()))
    named = from_pretrained(changed(tmp_path, name, id2label=backwards))
    assert named.config.label_names == tuple(names.values())
    save_pretrained(named.model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["id2label"] == names
    assert from_pretrained(tmp_path / "again").config == named.config


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
    assert not model.config.lm_head and not hasattr(model, "lm_head")
    with pytest.raises(ValueError, match="has no output layer"):
        model.logits(jnp.zeros((1, 1, model.config.d_model)))
    save_pretrained(model, tmp_path / "again")
    assert from_pretrained(tmp_path / "again").config == model.config


@pytest.mark.parametrize("name", ["gpt2_untied", "llama_grouped", "t5_v1_1"])
def test_a_model_that_says_it_has_a_head_must_have_it(tmp_path, name):
    lacks = changed(tmp_path, name, {"lm_head.weight": None}, tie_word_embeddings=False)
    assert_refused("lacks lm_head.weight, which its config asks for", from_pretrained, lacks)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type, transformers):
    config, family = transformers.AutoConfig.for_model(model_type), FAMILIES[model_type]
    defaults = {name: field.default for name, field in family.fields.items() if field.default is not REQUIRED}
    for field, value in {**defaults, **family.fixed, **family.special_ids}.items():
        expected = getattr(config, field, value)
        if value is not None:  # or else it is made of others
            assert value == expected, field


def test_numbers_of_16_bits_become_float32():
    for path, parameter in named_parameters(loaded("bert_bfloat16").model).items():
        assert parameter.dtype == jnp.float32, path
    table = named_parameters(loaded("bert_bfloat16").model)["embedding.table"][...]
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
        ("bert_masked_lm", {"hidden_act": "mish"}, "hidden_act='mish' is invalid; it must be one of gelu, "),
        ("bert_masked_lm", {"num_attention_heads": 3}, "num_heads=3 does not divide d_model=8"),
        (
            "roberta_masked_lm",
            {"position_embedding_type": "relative_key_query"},
            "position_embedding_type='relative_key",
        ),
        ("distilbert_masked_lm", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True"),
        ("distilbert_masked_lm", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("distilbert_masked_lm", {"activation": "mish"}, "activation='mish' is invalid"),
        ("gpt2_lm", {"embd_pdrop": 0.2}, "embd_pdrop=0.2 and resid_pdrop=0.1 cannot be loaded; .* make them equal"),
        ("gpt2_lm", {"num_attention_heads": 4}, "n_head=2 and num_attention_heads=4 are one setting; leave out"),
        ("gpt2_lm", {"per_layer_config": {"0": {"n_head": 4}}}, "per_layer_config=.* cannot be loaded"),
        ("gpt2_lm", {"quantization_config": {"bits": 4}}, "quantization_config=.* cannot be loaded"),
        ("bert_masked_lm", {"pruned_heads": {"0": [1]}}, "pruned_heads=.* cannot be loaded"),
        ("gpt2_lm", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2_lm", {"scale_attn_weights": False}, "scale_attn_weights=False cannot be loaded; it must be True"),
        ("gpt2_lm", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2_lm", {"activation_function": "mish"}, "activation_function='mish' is invalid"),
        (
            "llama_scaled",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type='yarn' is invalid; it must be one of default, linear, llama3",
        ),
        ("llama_scaled", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic'"),
        ("llama_scaled", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama_scaled", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama_scaled", {"pretraining_tp": 2}, "pretraining_tp=2"),
        (
            "llama_scaled",
            {"rope_scaling": {"rope_type": "linear", "factor": 2}},
            "rope_parameters and rope_scaling say different",
        ),
        ("llama_grouped", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters lacks factor; it must be"),
        (
            "llama_grouped",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_parameters: low_freq_factor=4 is invalid; it must be below high_freq_factor",
        ),
        ("llama_scaled", {"hidden_act": "mish"}, "hidden_act='mish' is invalid"),
        (
            "t5_v1_0",
            {"feed_forward_proj": "gated-mish"},
            "feed_forward_proj='gated-mish' is invalid; it must be one of relu",
        ),
        ("t5_v1_0", {"relative_attention_num_buckets": 3}, "num_buckets=3 must be at least 4"),
        ("t5_v1_0", {"dense_act_fn": "silu"}, "dense_act_fn='silu' cannot be loaded; it must be 'relu'"),
        ("t5_v1_0", {"is_gated_act": True}, "is_gated_act=True cannot be loaded; it must be False"),
        ("xlnet_lm", {"attn_type": "both"}, "attn_type='both'"),
        ("xlnet_lm", {"bi_data": True}, "bi_data=True"),
        ("xlnet_lm", {"same_length": True}, "same_length=True"),
        ("xlnet_lm", {"untie_r": False}, "untie_r=False"),
        ("xlnet_lm", {"reuse_len": 3}, "reuse_len=3"),
        ("xlnet_lm", {"d_head": 5}, "d_head=5 cannot be loaded; it must be 4"),
        ("xlnet_lm", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("xlnet_lm", {"ff_activation": "mish"}, "ff_activation='mish' is invalid"),
        ("marian_shared", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1 cannot be loaded; it must be 0.0"),
        ("marian_shared", {"decoder_layerdrop": 0.1}, "decoder_layerdrop=0.1 cannot be loaded; it must be 0.0"),
        ("pegasus_shared", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ("pegasus_shared", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (
            "pegasus_shared",
            {"max_position_embeddings": 10_000_000},
            r"max_position_embeddings=10000000, but the encoder's embed_positions have shape \(12, 8\)",
        ),
        ("marian_shared", {"tie_word_embeddings": False}, "an output layer of its own with shared embeddings"),
        ("marian_shared", {"activation_function": "mish"}, "activation_function='mish' is invalid"),
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
        *("pegasus_shared", "pegasus_model"),
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
            "has bert.encoder.layer.2.output.dense.bias, for which its config has no weight",
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
def test_every_tensor_is_accounted_for(tmp_path, tensors, message):
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
    for other in (interleaved, halved + 0.01):
        folder = changed(tmp_path, "marian_shared", {table: other.astype(np.float32)})
        assert_refused(f"{table} is not what a model of its config computes there", from_pretrained, folder)
    folder = changed(tmp_path, "marian_shared", {table: halved[:10].astype(np.float32)})
    assert_refused(r"max_position_embeddings=12, but the decoder's embed_positions have", from_pretrained, folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json; name the folder of a checkpoint of transformers"),
        (b"", "config.json cannot be read: Expecting value"),
        (b'{"model_type": "bert"', "config.json cannot be read: Expecting"),
        (b"\xff\xfe", "config.json cannot be read: .*decode"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "config.json cannot be read: .*nested too deeply"),
        (b'{"a": 1, "a": 2}', "config.json cannot be read: .*twice"),
        (b'{"a": NaN}', "config.json cannot be read: .*NaN"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config.json cannot be read: .*digits"),
        (b'["bert"]', "config.json cannot be read: its JSON is not an object"),
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

    def counted(tensor: Tensor) -> np.ndarray:
        nonlocal largest
        array = np.array(read(tensor))  # which owns its numbers: whatever is made of them keeps it alive
        largest = max(largest, array.nbytes)
        alive[len(reads)] = array.nbytes
        weakref.finalize(array, alive.pop, len(reads))
        reads.append(sum(alive.values()))
        return array

    monkeypatch.setattr(Tensor, "read", counted)
    model = from_pretrained(REFERENCES["gpt2_sharded"].folder).model
    assert len(reads) > 20 and max(reads) == largest and not alive
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert largest < size / 4
    from_pretrained(REFERENCES["t5_bin"].folder)
    assert max(reads) == 2 * largest and not alive


def test_a_tokenizer_that_cannot_be_used_leaves_the_model(tmp_path):
    folder = changed(tmp_path, "gpt2_lm")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.warns(UserWarning, match="the tokenizer in .* is left out: .*cannot be read"):
        assert from_pretrained(folder).tokenizer is None


@pytest.mark.parametrize("name", ["gpt2_untied", "bert_masked_lm", "t5_v1_0"])
def test_the_parameters_are_those_of_the_checkpoint(name):
    """Which has none twice, and nothing that is not a parameter."""
    expected = sum(tensor.read().size for tensor in open_tensors(REFERENCES[name].folder).values())
    assert loaded(name).num_parameters == expected


def test_called_like_a_model_it_is_compiled_once_for_each_shape(monkeypatch):
    bert, ids, traces = loaded("bert_masked_lm"), np.arange(10, 16)[None], []
    encode = type(bert.model)._encode

    def traced(model, *arguments, **named):
        traces.append(arguments[0].shape)
        return encode(model, *arguments, **named)

    monkeypatch.setattr(type(bert.model), "_encode", traced)
    expected = bert.model(ids)
    del traces[:]
    for array in (ids, ids + 1, ids[:, :4], ids, np.concatenate([ids, ids])):
        hidden = bert(array, valid=np.ones(array.shape, bool))
    assert traces == [(1, 6), (1, 4), (2, 6)]
    np.testing.assert_allclose(hidden[:1], expected, rtol=1e-5, atol=1e-6)
    logits = bert.apply("masked_lm", hidden)
    np.testing.assert_allclose(logits, bert.model.masked_lm(hidden), rtol=1e-5, atol=1e-5)
    marian = loaded("marian_shared")
    assert marian(ids, ids).shape == (1, 6, 40) and marian.apply("encode", ids).shape == (1, 6, 8)
