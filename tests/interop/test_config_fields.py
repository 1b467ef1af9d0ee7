"""Every field of a config.json is honoured, checked to make no difference, or refused in one line that names it."""

import json
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.interop.checkpoints import assert_refused, changed, loaded
from tests.reference import REFERENCES
from transformer_jax.errors import UserError
from transformer_jax.interop import Pretrained, from_pretrained, pretrained, save_pretrained
from transformer_jax.interop.family import ANY_FAMILY, FIXED
from transformer_jax.interop.fields import REQUIRED
from transformer_jax.interop.pretrained import FAMILIES
from transformer_jax.interop.special_ids import NAMES
from transformer_jax.models import T5, Bert, BertConfig, Transformer

WRONG = ("48", None, 48.0, [1], {"a": 1}, True, -1, 0, 1.5, 10**30, "", [[]], 3)
"""Each is wrong for most fields, and right for some."""

CHECKPOINTS = {
    "bert": "bert_sequence_classification",
    "roberta": "roberta_masked_lm",
    "distilbert": "distilbert_token_classification",
    "gpt2": "gpt2_lm",
    "llama": "llama_scaled",
    "t5": "t5_v1_1",
    "xlnet": "xlnet_lm",
    "pegasus": "pegasus_shared",
    "marian": "marian_own_tables",
}
each_family = pytest.mark.parametrize("model_type", FAMILIES)

MAKES_NO_DIFFERENCE = {
    "what the weights were when they were new": {"initializer_range", "initializer_factor", "init_std"},
    "how much memory transformers takes": {"chunk_size_feed_forward", "use_cache", "reorder_and_upcast_attn"},
    "what transformers returns besides": {
        *("output_hidden_states", "output_attentions", "return_dict", "tie_last_hidden_states")
    },
    "which the model type says": {"is_encoder_decoder", "transformers_version"},
    "the tensors have their own": {"dtype"},
    "id2label says the same": {"label2id"},
    "the loss of a classifier, which the model does not compute": {"problem_type"},
    "of a head that is refused by its tensors": {
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        *("summary_first_dropout", "summary_last_dropout", "start_n_top", "end_n_top"),
    },
    "whoever calls an XLNet gives the memory": {"use_mems_eval", "use_mems_train"},
}
"""Fields of transformers that need not be read, and why."""
OF_A_HEAD = {name: {"id2label"} for name in ("llama", "xlnet", "pegasus", "marian")}
OF_A_HEAD["t5"] = {"id2label", "classifier_dropout"}
"""Those of which that holds in one family only."""


@each_family
def test_somebody_has_thought_about_every_field_of_transformers(model_type, transformers):
    config, family = transformers.AutoConfig.for_model(model_type), FAMILIES[model_type]
    known = {*family.fields, *family.fixed, *family.aliases, *ANY_FAMILY, *FIXED, *NAMES.values(), "model_type"}
    harmless = set().union(*MAKES_NO_DIFFERENCE.values()) | OF_A_HEAD.get(model_type, set())
    assert not known & harmless
    theirs = {*config.to_dict(), *config.attribute_map}
    if is_dataclass(config):
        theirs |= {field.name for field in dataclass_fields(config)}
    assert {name for name in theirs if not name.startswith("_")} <= known | harmless
    assert config.attribute_map.items() <= family.aliases.items()


@cache
def names(model_type: str) -> list[str]:
    family = FAMILIES[model_type]
    return sorted({*family.fields, *family.fixed, *family.aliases, *ANY_FAMILY, *NAMES.values(), "model_type"})


def loaded_or_refused(folder: Path) -> Pretrained | None:
    """A checkpoint; None where it is refused as it should be: in one line that is not too long."""
    try:
        return from_pretrained(folder)
    except UserError as error:
        message = str(error)
    assert "\n" not in message and len(message) < 400
    return None


def call(model) -> None:
    """The shapes of a forward pass: an invalid config would fail here at the latest."""
    ids = jnp.zeros((1, 4), jnp.int32)
    arguments = (ids, ids) if isinstance(model, T5 | Transformer) else (ids,)
    jax.eval_shape(type(model).__call__, model, *arguments)


@each_family
def test_a_wrong_value_is_refused_in_one_line_or_does_no_harm(tmp_path, model_type, monkeypatch):
    name = CHECKPOINTS[model_type]
    folder, fields, config = changed(tmp_path, name), REFERENCES[name].fields, loaded(name).config

    def load(field: str, value) -> Pretrained | None:
        (folder / "config.json").write_text(json.dumps({**fields, field: value}))
        return loaded_or_refused(folder)

    with monkeypatch.context() as patch:  # the weights are read only where the config is another
        patch.setattr(pretrained, "load_weights", lambda *_, **__: None)
        found = {(field, str(value)): (load(field, value), value) for field in names(model_type) for value in WRONG}
    others = [(field, value) for (field, _), (again, value) in found.items() if again and again.config != config]
    assert len(others) < len(found) / 4
    for field, value in others:
        if again := load(field, value):
            call(again.model)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_wrong_value_of_rotary_scaling_is_refused_in_one_line(tmp_path, name):
    folder, fields = changed(tmp_path, "llama_scaled"), dict(REFERENCES["llama_scaled"].fields)
    rope = fields.pop("rope_parameters")
    for field in (*rope, "partial_rotary_factor", "type"):
        for value in WRONG:
            said = {**rope, field: value} if field != "type" else {"type": value}
            (folder / "config.json").write_text(json.dumps({**fields, name: said}))
            if again := loaded_or_refused(folder):
                call(again.model)


@each_family
def test_a_size_that_is_left_out_is_not_guessed(tmp_path, model_type):
    name = CHECKPOINTS[model_type]
    sizes = {name for name, field in FAMILIES[model_type].fields.items() if field.default is REQUIRED}
    heads = {"num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads"}
    assert len(sizes) >= 5 and len(sizes & heads) == 1
    for size in sizes:
        folder = changed(tmp_path, name, **{size: None})
        assert_refused(f"config.json lacks {size}; it must be a whole number", from_pretrained, folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bert_model", {"hidden_size": "8"}, "hidden_size='8' is invalid; it must be a whole number from 1 to "),
        ("bert_model", {"hidden_size": 8.0}, "hidden_size=8.0 is invalid; it must be a whole number"),
        ("bert_model", {"num_hidden_layers": True}, "num_hidden_layers=True is invalid"),
        ("bert_model", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is invalid; it must be a whole"),
        ("bert_model", {"hidden_dropout_prob": 1.0}, "hidden_dropout_prob=1.0 is invalid; .* at least 0 and below 1"),
        ("bert_model", {"layer_norm_eps": 0}, "layer_norm_eps=0 is invalid; it must be a positive number"),
        ("bert_model", {"pad_token_id": 40}, "pad_token_id=40 is outside the vocabulary of 40"),
        ("bert_model", {"architectures": "BertModel"}, "architectures='BertModel' is invalid; it must be a list"),
        (
            "bert_token_classification",
            {"id2label": {"1": "a", "2": "b"}},
            "id2label=.* is invalid; it must be an object",
        ),
        ("bert_token_classification", {"id2label": ["a", "b"]}, "id2label=.* is invalid"),
        ("marian_own_tables", {"pad_token_id": 43}, "pad_token_id=43 is outside the vocabulary of 40"),
        ("llama_scaled", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "rope_parameters: factor='2' is"),
        ("llama_scaled", {"rope_parameters": [1]}, r"rope_parameters=\[1\] is invalid; it must be an object, or null"),
        (
            "llama_scaled",
            {"rope_parameters": {"rope_type": ["linear"]}},
            "rope_parameters: rope_type=.* is invalid; it must be one of",
        ),
        ("gpt2_lm", {"eos_token_id": "2"}, "eos_token_id='2' is invalid; it must be an id, a list of ids, or null"),
        ("gpt2_lm", {"eos_token_id": [2, "3"]}, "eos_token_id=.* is invalid"),
        ("gpt2_lm", {"bos_token_id": True}, "bos_token_id=True is invalid; it must be an id, or null"),
        ("gpt2_lm", {"activation_function": "x" * 10_000}, "activation_function='xxx.*' is invalid"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, name, fields, message):
    assert_refused(f"config.json: {message}", from_pretrained, changed(tmp_path, name, **fields))


def test_a_field_may_have_its_other_name(tmp_path):
    renamed = changed(tmp_path, "gpt2_lm", n_head=None, n_embd=None, num_attention_heads=2, hidden_size=8)
    assert from_pretrained(renamed).config == loaded("gpt2_lm").config
    renamed = changed(tmp_path, "xlnet_lm", vocab_size=None, n_token=40)
    assert from_pretrained(renamed).config == loaded("xlnet_lm").config


@pytest.mark.parametrize(
    ("name", "field", "rate", "method"),
    [
        ("bert_sequence_classification", "classifier_dropout", 0.6, "classify"),
        ("bert_token_classification", "classifier_dropout", 0.6, "tag"),
        ("roberta_sequence_classification", "classifier_dropout", 0.6, "classify"),
        ("distilbert_sequence_classification", "seq_classif_dropout", 0.6, "classify"),
        ("distilbert_question_answering", "qa_dropout", 0.6, "span"),
    ],
)
def test_the_dropout_of_a_head_is_honoured_and_kept(tmp_path, monkeypatch, name, field, rate, method):
    found = from_pretrained(changed(tmp_path, name, **{field: rate}))
    assert found.config.head_dropout_rate == rate != found.config.dropout_rate
    rates = []
    monkeypatch.setattr("transformer_jax.layers.heads.dropout", lambda x, rate, key: rates.append(rate) or x)
    getattr(found.model, method)(jnp.ones((1, 2, found.config.d_model)), dropout_key=jax.random.key(0))
    assert rates == [rate]
    save_pretrained(found.model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())[field] == rate


def test_a_dropout_that_a_checkpoint_cannot_say_is_not_lost(tmp_path):
    config = replace(BertConfig.base(20), d_model=8, num_heads=2, d_ff=8, num_layers=1, heads=("span",))
    model = jax.eval_shape(lambda: Bert(replace(config, head_dropout_rate=0.3), rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"head_dropout_rate=0.3 cannot be saved"):
        save_pretrained(model, tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bert_masked_lm", {"classifier_dropout": 0.5}),
        ("distilbert_masked_lm", {"seq_classif_dropout": 0.5, "qa_dropout": 0.5}),
        ("gpt2_lm", {"summary_first_dropout": 0.7, "pruned_heads": {}, "is_decoder": None}),
        ("t5_v1_0", {"classifier_dropout": 0.3}),
        ("xlnet_lm", {"summary_last_dropout": 0.5}),
        ("llama_grouped", {"attention_dropout": None, "pretraining_tp": None}),
    ],
)
def test_what_this_model_would_not_read_is_not_refused(tmp_path, name, fields, recwarn):
    assert from_pretrained(changed(tmp_path, name, **fields)).config == loaded(name).config
    assert not recwarn
