"""DistilBERT checkpoints."""

from collections.abc import Mapping
from functools import partial

from transformer_jax.interop.bert import heads_of, labels_of, names_of, rename, require_tied, write_config
from transformer_jax.interop.family import Family, Json, blocks, linear, norm, read_fields, require
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.bert import BertConfig, Head

FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "dim",
    "num_heads": "n_heads",
    "d_ff": "hidden_dim",
    "num_layers": "n_layers",
    "max_length": "max_position_embeddings",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
    "activation": "activation",
    "pad_id": "pad_token_id",
}
DEFAULTS = {
    "vocab_size": 30_522,
    "dim": 768,
    "n_heads": 12,
    "hidden_dim": 3072,
    "n_layers": 6,
    "max_position_embeddings": 512,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation": "gelu",
    "pad_token_id": 0,
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
    heads: dict[Head, dict[str, Weight]] = {
        "pooler": linear("pooler", "pre_classifier"),
        "masked_lm": linear("transform", "vocab_transform")
        | norm("transform_norm", "vocab_layer_norm")
        | {"output_bias": Weight("vocab_projector.bias")},
        "classifier": linear("classifier_output", "classifier"),
        "tagger": linear("tagger_output", "classifier"),
        "span": linear("span_output", "qa_outputs"),
    }
    copies = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
    layers = blocks("encoder.blocks", "distilbert.transformer.layer.{layer}", BLOCK)
    return names_of("distilbert", config, layers, heads, copies)


def _read(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    require(json, sinusoidal_pos_embds=False)
    shown_by: dict[Head, str] = {
        "pooler": "pre_classifier.",
        "masked_lm": "vocab_projector.",
        "classifier": "classifier.",
        "tagger": "classifier.",
        "span": "qa_outputs.",
    }
    heads = heads_of("DistilBert", json, found, shown_by)
    require_tied(json, heads)
    return BertConfig(
        **read_fields(json, FIELDS),
        num_types=0,
        position_start=0,
        norm_epsilon=EPSILON,
        pooler_activation="relu",
        heads=heads,
        **labels_of(json, heads),
    )


DISTILBERT = Family(
    "distilbert",
    DEFAULTS,
    partial(rename, "distilbert"),
    _read,
    partial(write_config, "DistilBert", FIELDS, pooler_activation="relu", norm_epsilon=EPSILON),
    _names,
)
