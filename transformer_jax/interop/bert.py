"""BERT, RoBERTa and DistilBERT checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.interop.family import (
    Family,
    Json,
    blocks,
    linear,
    norm,
    read_fields,
    require,
    require_config,
    table,
    write_fields,
)
from transformer_jax.interop.torch_bin import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.bert import BertConfig, Head

ARCHITECTURES: dict[str, tuple[Head, ...]] = {
    "Model": (),
    "ForPreTraining": ("pooler", "masked_lm", "next_sentence"),
    "ForMaskedLM": ("masked_lm",),
    "ForNextSentencePrediction": ("pooler", "next_sentence"),
    "ForSequenceClassification": ("pooler", "classifier"),
    "ForTokenClassification": ("tagger",),
    "ForQuestionAnswering": ("span",),
}
"""The heads of an architecture, by the end of its name. A pooler that nothing reads may be there or not, but not in
DistilBERT, where it is part of the classifier; next_sentence is BERT's alone."""

FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_types": "type_vocab_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "norm_epsilon": "layer_norm_eps",
    "pad_id": "pad_token_id",
}
DEFAULTS = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}
BLOCK = {
    "self_attention.query": "attention.self.query",
    "self_attention.key": "attention.self.key",
    "self_attention.value": "attention.self.value",
    "self_attention.output": "attention.output.dense",
    "self_attention_residual.norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_residual.norm": "output.LayerNorm",
}

DISTILBERT_FIELDS = {
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
DISTILBERT_DEFAULTS = {
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
DISTILBERT_EPSILON = 1e-12
DISTILBERT_BLOCK = {
    "self_attention.query": "attention.q_lin",
    "self_attention.key": "attention.k_lin",
    "self_attention.value": "attention.v_lin",
    "self_attention.output": "attention.out_lin",
    "self_attention_residual.norm": "sa_layer_norm",
    "feed_forward.input": "ffn.lin1",
    "feed_forward.output": "ffn.lin2",
    "feed_forward_residual.norm": "output_layer_norm",
}


def _bert_names(config: BertConfig) -> Names:
    heads: dict[Head, dict[str, Weight]] = {
        "pooler": linear("pooler", "bert.pooler.dense"),
        "masked_lm": linear("transform", "cls.predictions.transform.dense")
        | norm("transform_norm", "cls.predictions.transform.LayerNorm")
        | {"output_bias": Weight("cls.predictions.bias")},
        "next_sentence": linear("next_sentence_output", "cls.seq_relationship"),
        "classifier": linear("classifier_output", "classifier"),
        "tagger": linear("tagger_output", "classifier"),
        "span": linear("span_output", "qa_outputs"),
    }
    copies = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return _names("bert", config, blocks("encoder.blocks", "bert.encoder.layer.{layer}", BLOCK), heads, copies)


def _roberta_names(config: BertConfig) -> Names:
    heads: dict[Head, dict[str, Weight]] = {
        "pooler": linear("pooler", "classifier.dense" if "classifier" in config.heads else "roberta.pooler.dense"),
        "masked_lm": linear("transform", "lm_head.dense")
        | norm("transform_norm", "lm_head.layer_norm")
        | {"output_bias": Weight("lm_head.bias")},
        "classifier": linear("classifier_output", "classifier.out_proj"),
        "tagger": linear("tagger_output", "classifier"),
        "span": linear("span_output", "qa_outputs"),
    }
    copies = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    names = _names("roberta", config, blocks("encoder.blocks", "roberta.encoder.layer.{layer}", BLOCK), heads, copies)
    if "classifier" not in config.heads:
        return names
    # What was trained from an older checkpoint still has its pooler, though the classifier came with another.
    return replace(names, unread=("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"))


def _distilbert_names(config: BertConfig) -> Names:
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
    layers = blocks("encoder.blocks", "distilbert.transformer.layer.{layer}", DISTILBERT_BLOCK)
    return _names("distilbert", config, layers, heads, copies)


def _names(
    prefix: str,
    config: BertConfig,
    layers: dict[str, Weight],
    heads: Mapping[Head, dict[str, Weight]],
    copies: Mapping[str, str],
) -> Names:
    weights = table("embedding", f"{prefix}.embeddings.word_embeddings")
    weights |= table("position_embedding", f"{prefix}.embeddings.position_embeddings")
    weights |= norm("embedding_norm", f"{prefix}.embeddings.LayerNorm")
    if config.num_types:
        weights |= table("type_embedding", f"{prefix}.embeddings.token_type_embeddings")
    for head in config.heads:
        weights |= heads[head]
    return Names(weights | layers, copies if "masked_lm" in config.heads else {})


def _read_bert(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    shown_by: dict[Head, str] = {
        "pooler": "bert.pooler.",
        "masked_lm": "cls.predictions.",
        "next_sentence": "cls.seq_relationship.",
        "classifier": "classifier.",
        "tagger": "classifier.",
        "span": "qa_outputs.",
    }
    return _read(json, position_start=0, heads=_heads("Bert", json, found, shown_by))


def _read_roberta(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    shown_by: dict[Head, str] = {
        "pooler": "roberta.pooler.",
        "masked_lm": "lm_head.",
        "classifier": "classifier.out_proj.",
        "tagger": "classifier.weight",
        "span": "qa_outputs.",
    }
    return _read(json, position_start=json["pad_token_id"] + 1, heads=_heads("Roberta", json, found, shown_by))


def _read(json: Json, *, position_start: int, heads: tuple[Head, ...]) -> BertConfig:
    require(json, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    _require_tied(json, heads)
    return BertConfig(
        **read_fields(json, FIELDS),
        max_length=json["max_position_embeddings"] - position_start,
        position_start=position_start,
        heads=heads,
        num_labels=_num_labels(json, heads),
    )


def _read_distilbert(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    require(json, sinusoidal_pos_embds=False)
    shown_by: dict[Head, str] = {
        "pooler": "pre_classifier.",
        "masked_lm": "vocab_projector.",
        "classifier": "classifier.",
        "tagger": "classifier.",
        "span": "qa_outputs.",
    }
    heads = _heads("DistilBert", json, found, shown_by)
    _require_tied(json, heads)
    return BertConfig(
        **read_fields(json, DISTILBERT_FIELDS),
        num_types=0,
        position_start=0,
        norm_epsilon=DISTILBERT_EPSILON,
        pooler_activation="relu",
        heads=heads,
        num_labels=_num_labels(json, heads),
    )


def _heads(prefix: str, json: Json, found: Mapping[str, Tensor], shown_by: Mapping[Head, str]) -> tuple[Head, ...]:
    """The heads that a checkpoint says it has, and those that its tensors show."""
    said = set(ARCHITECTURES.get((json.get("architectures") or [""])[0].removeprefix(prefix), ()))
    shown = {head for head, start in shown_by.items() if any(name.startswith(start) for name in found)}
    if {"classifier", "tagger"} <= shown:  # both have this name; a tagger needs no pooler
        shown.discard(
            "tagger" if "classifier" in said or ("pooler" in shown and "tagger" not in said) else "classifier"
        )
    if "classifier" in shown:
        shown.add("pooler")
    order = dict.fromkeys(head for heads in ARCHITECTURES.values() for head in heads)
    return tuple(head for head in order if head in said | shown)


def _require_tied(json: Json, heads: tuple[Head, ...]) -> None:
    if "masked_lm" in heads:
        require(json, tie_word_embeddings=True)


def _num_labels(json: Json, heads: tuple[Head, ...]) -> int | None:
    if not {"classifier", "tagger"} & set(heads):
        return None
    return json["num_labels"] if "num_labels" in json else len(json.get("id2label") or ("no", "yes"))


def _write(prefix: str, fields: Mapping[str, str], config: BertConfig) -> dict[str, Any]:
    if prefix == "Roberta":
        require_config(config, prefix, position_start=(config.pad_id or 0) + 1, num_types=config.num_types or 1)
    if prefix == "DistilBert":
        require_config(config, prefix, norm_epsilon=DISTILBERT_EPSILON)
    if "pooler" in config.heads:
        require_config(config, prefix, pooler_activation="relu" if prefix == "DistilBert" else "tanh")
    labels = {str(label): f"LABEL_{label}" for label in range(config.num_labels or 0)}
    return {
        "architectures": [prefix + _architecture(prefix, config)],
        **write_fields(config, fields),
        "max_position_embeddings": config.max_length + config.position_start,
        **({"id2label": labels, "label2id": {name: int(id) for id, name in labels.items()}} if labels else {}),
    }


def _architecture(prefix: str, config: BertConfig) -> str:
    for name, heads in ARCHITECTURES.items():
        unread = set() if prefix == "DistilBert" else {"pooler"}
        if set(config.heads) in (set(heads), {*heads, *unread}) and (prefix == "Bert" or "next_sentence" not in heads):
            return name
    raise UserError(f"heads={config.heads} are those of no {prefix} architecture of transformers; leave some out")


def _rename(prefix: str, name: str) -> str | None:
    """With the prefix that a bare model lacks, and without the gamma and beta of old."""
    if name.endswith(".position_ids"):
        return None
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", re.sub(r"(?<=LayerNorm\.)beta$", "bias", name))
    bare = name.startswith(("embeddings.", "encoder.", "transformer.", "pooler."))
    return f"{prefix}.{name}" if bare else name


BERT = Family("bert", DEFAULTS, partial(_rename, "bert"), _read_bert, partial(_write, "Bert", FIELDS), _bert_names)
ROBERTA = Family(
    "roberta",
    DEFAULTS | {"vocab_size": 50_265, "pad_token_id": 1},
    partial(_rename, "roberta"),
    _read_roberta,
    partial(_write, "Roberta", FIELDS),
    _roberta_names,
)
DISTILBERT = Family(
    "distilbert",
    DISTILBERT_DEFAULTS,
    partial(_rename, "distilbert"),
    _read_distilbert,
    partial(_write, "DistilBert", DISTILBERT_FIELDS),
    _distilbert_names,
)
