"""DistilBERT checkpoints."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformer_jax.interop.bert import HEADS, heads_of, labels_of, names_of, rename, require_tied, write_config
from transformer_jax.interop.family import ACTIVATION, Family, blocks, linear, norm, our_fields, require_config
from transformer_jax.interop.fields import ID, LAYERS, RATE, SIZE, Field, Json
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.bert import BertConfig, BertHead

FIELDS = HEADS | {
    "vocab_size": Field(SIZE, "vocab_size"),
    "dim": Field(SIZE, "d_model"),
    "n_heads": Field(SIZE, "num_heads"),
    "hidden_dim": Field(SIZE, "d_ff"),
    "n_layers": Field(LAYERS, "num_layers"),
    "max_position_embeddings": Field(SIZE, "max_length"),
    "dropout": Field(RATE, "dropout_rate", 0.1),
    "attention_dropout": Field(RATE, "attention_dropout_rate", 0.1),
    "seq_classif_dropout": Field(RATE, default=0.2),
    "qa_dropout": Field(RATE, default=0.1),
    "activation": Field(ACTIVATION, "activation", "gelu"),
    "pad_token_id": Field(ID, "pad_id", 0),
}
EPSILON = 1e-12
BLOCK = {
    "self_attention.query": "attention.q_lin",
    "self_attention.key": "attention.k_lin",
    "self_attention.value": "attention.v_lin",
    "self_attention.output": "attention.out_lin",
    "self_attention_residual.norm": "sa_layer_norm",
    "feed_forward.input": "ffn.lin1",
    "feed_forward.output": "ffn.lin2",
    "feed_forward_residual.norm": "output_layer_norm",
}


def _names(config: BertConfig) -> Names:
    heads: dict[BertHead, dict[str, Weight]] = {
        "pooler": linear("pooler.output", "pre_classifier"),
        "masked_lm": linear("lm_head.transform", "vocab_transform")
        | norm("lm_head.norm", "vocab_layer_norm")
        | {"lm_head.bias": Weight("vocab_projector.bias")},
        "classifier": linear("classification_head.output", "classifier"),
        "tagger": linear("tagging_head.output", "classifier"),
        "span": linear("span_head.output", "qa_outputs"),
    }
    copies = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
    layers = blocks("encoder.blocks", "distilbert.transformer.layer.{layer}", BLOCK)
    return names_of("distilbert", config, layers, heads, copies)


def _read(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    shown_by: dict[BertHead, str] = {
        "pooler": "pre_classifier.",
        "masked_lm": "vocab_projector.",
        "classifier": "classifier.",
        "tagger": "classifier.",
        "span": "qa_outputs.",
    }
    heads = heads_of("DistilBert", json, found, shown_by)
    require_tied(json, heads)
    return BertConfig(
        **our_fields(json, FIELDS),
        num_types=0,
        position_start=0,
        norm_epsilon=EPSILON,
        pooler_activation="relu",
        heads=heads,
        head_dropout_rate=_head_dropout(json, heads),
        **labels_of(json, heads),
    )


def _head_dropout(json: Json, heads: tuple[BertHead, ...]) -> float | None:
    """The dropout of a head that has its own; the tagger has none."""
    fields: dict[BertHead, str] = {"classifier": "seq_classif_dropout", "span": "qa_dropout"}
    return next((json[field] for head, field in fields.items() if head in heads), None)


def _write(config: BertConfig) -> dict[str, Any]:
    if "tagger" in config.heads:
        require_config(config, "DistilBERT's tagger", head_dropout_rate=None)
    written = write_config("DistilBert", FIELDS, config, pooler_activation="relu", norm_epsilon=EPSILON)
    if "classifier" in config.heads:
        said = config.head_dropout_rate
        written["seq_classif_dropout"] = config.dropout_rate if said is None else said
    if "span" in config.heads:
        written["qa_dropout"] = config.head_dropout_rate or 0.0
    return written


DISTILBERT = Family(
    "distilbert",
    FIELDS,
    partial(rename, "distilbert"),
    _read,
    _write,
    _names,
    fixed={"sinusoidal_pos_embds": False},
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)
