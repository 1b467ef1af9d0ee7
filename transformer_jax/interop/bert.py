"""BERT checkpoints, and what those of RoBERTa and DistilBERT share with them."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.interop.family import (
    ACTIVATION,
    Family,
    blocks,
    linear,
    norm,
    our_fields,
    require_config,
    table,
    their_fields,
)
from transformer_jax.interop.fields import (
    COUNT,
    FLAG,
    ID,
    LABELS,
    LAYERS,
    POSITIVE,
    RATE,
    SIZE,
    Field,
    Json,
    optional,
    require,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.bert import BertConfig, BertHead
from transformer_jax.models.gpt import GPTConfig

ARCHITECTURES: dict[str, tuple[BertHead, ...]] = {
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

HEADS = {
    "tie_word_embeddings": Field(FLAG, default=True),
    "id2label": Field(optional(LABELS), default=None),
    "num_labels": Field(optional(SIZE), default=None),
}
"""Fields that say something of the heads, in all three families."""
FIELDS = HEADS | {
    "vocab_size": Field(SIZE, "vocab_size"),
    "hidden_size": Field(SIZE, "d_model"),
    "num_attention_heads": Field(SIZE, "num_heads"),
    "intermediate_size": Field(SIZE, "d_ff"),
    "num_hidden_layers": Field(LAYERS, "num_layers"),
    "max_position_embeddings": Field(SIZE),
    "type_vocab_size": Field(COUNT, "num_types", 2),
    "hidden_dropout_prob": Field(RATE, "dropout_rate", 0.1),
    "attention_probs_dropout_prob": Field(RATE, "attention_dropout_rate", 0.1),
    "classifier_dropout": Field(optional(RATE), default=None),
    "hidden_act": Field(ACTIVATION, "activation", "gelu"),
    "layer_norm_eps": Field(POSITIVE, "norm_epsilon", 1e-12),
    "pad_token_id": Field(ID, "pad_id", 0),
}
FIXED = {"position_embedding_type": "absolute"}
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


def _names(config: BertConfig) -> Names:
    heads: dict[BertHead, dict[str, Weight]] = {
        "pooler": linear("pooler.output", "bert.pooler.dense"),
        "masked_lm": linear("lm_head.transform", "cls.predictions.transform.dense")
        | norm("lm_head.norm", "cls.predictions.transform.LayerNorm")
        | {"lm_head.bias": Weight("cls.predictions.bias")},
        "next_sentence": linear("next_sentence_head.output", "cls.seq_relationship"),
        "classifier": linear("classification_head.output", "classifier"),
        "tagger": linear("tagging_head.output", "classifier"),
        "span": linear("span_head.output", "qa_outputs"),
    }
    copies = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return names_of("bert", config, blocks("encoder.blocks", "bert.encoder.layer.{layer}", BLOCK), heads, copies)


def names_of(
    prefix: str,
    config: BertConfig,
    layers: dict[str, Weight],
    heads: Mapping[BertHead, dict[str, Weight]],
    copies: Mapping[str, str],
) -> Names:
    """The tensors of a model, of which the embeddings are called alike in all three families."""
    weights = table("embedding", f"{prefix}.embeddings.word_embeddings")
    weights |= table("position_embedding", f"{prefix}.embeddings.position_embeddings")
    weights |= norm("embedding_norm", f"{prefix}.embeddings.LayerNorm")
    if config.num_types:
        weights |= table("type_embedding", f"{prefix}.embeddings.token_type_embeddings")
    for head in config.heads:
        weights |= heads[head]
    return Names(weights | layers, copies if "masked_lm" in config.heads else {})


def _read(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    shown_by: dict[BertHead, str] = {
        "pooler": "bert.pooler.",
        "masked_lm": "cls.predictions.",
        "next_sentence": "cls.seq_relationship.",
        "classifier": "classifier.",
        "tagger": "classifier.",
        "span": "qa_outputs.",
    }
    return read_config(json, position_start=0, heads=heads_of("Bert", json, found, shown_by))


def read_config(json: Json, *, position_start: int, heads: tuple[BertHead, ...]) -> BertConfig:
    """Our config, where a config.json has the fields of BERT."""
    require_tied(json, heads)
    labelled = {"classifier", "tagger"} & set(heads)
    return BertConfig(
        **our_fields(json, FIELDS),
        max_length=json["max_position_embeddings"] - position_start,
        position_start=position_start,
        heads=heads,
        head_dropout_rate=json["classifier_dropout"] if labelled else None,
        **labels_of(json, heads),
    )


def heads_of(
    prefix: str, json: Json, found: Mapping[str, Tensor], shown_by: Mapping[BertHead, str]
) -> tuple[BertHead, ...]:
    """The heads that a checkpoint says it has, and those that its tensors show."""
    said = set(ARCHITECTURES.get((json["architectures"] or [""])[0].removeprefix(prefix), ()))
    shown = {head for head, start in shown_by.items() if any(name.startswith(start) for name in found)}
    if {"classifier", "tagger"} <= shown:  # both have this name; a tagger needs no pooler
        shown.discard(
            "tagger" if "classifier" in said or ("pooler" in shown and "tagger" not in said) else "classifier"
        )
    if "classifier" in shown:
        shown.add("pooler")
    order = dict.fromkeys(head for heads in ARCHITECTURES.values() for head in heads)
    return tuple(head for head in order if head in said | shown)


def require_tied(json: Json, heads: tuple[BertHead, ...]) -> None:
    """Raise on an output layer of its own, which no published checkpoint has."""
    if "masked_lm" in heads:
        require(json, {"tie_word_embeddings": True})


def labels_of(json: Json, heads: tuple[BertHead, ...]) -> dict[str, Any]:
    """How many labels there are, where a head gives labels, and their names, unless these are numbers."""
    if not {"classifier", "tagger"} & set(heads):
        return {}
    given = json["id2label"] or {}
    names = tuple(str(given[str(label)]) for label in range(len(given)))
    count = len(names) or json["num_labels"] or 2
    return {"num_labels": count, "label_names": names if names != _numbered(len(names)) else ()}


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{label}" for label in range(count))


def write_config(
    prefix: str, fields: Mapping[str, Field], config: BertConfig, *, pooler_activation: str = "tanh", **values: Any
) -> dict[str, Any]:
    """The config.json of a config which, like all of its family, has these values."""
    require_config(config, prefix, **values)
    if "pooler" in config.heads:
        require_config(config, prefix, pooler_activation=pooler_activation)
    own_dropout = {}
    if "classifier_dropout" in fields:
        if "span" in config.heads:  # which drops nothing there
            require_config(config, prefix, head_dropout_rate=None)
        own_dropout["classifier_dropout"] = config.head_dropout_rate
    return {
        "architectures": [prefix + _architecture(prefix, config)],
        **their_fields(config, fields),
        **own_dropout,
        "max_position_embeddings": config.max_length + config.position_start,
        **label_fields(config),
    }


def label_fields(config: BertConfig | GPTConfig) -> dict[str, Any]:
    """The labels of a config of ours as config.json has them."""
    labels = dict(enumerate(config.label_names or _numbered(config.num_labels or 0)))
    return {"id2label": labels, "label2id": {name: id for id, name in labels.items()}} if labels else {}


def _architecture(prefix: str, config: BertConfig) -> str:
    for name, heads in ARCHITECTURES.items():
        unread = set() if prefix == "DistilBert" else {"pooler"}
        if set(config.heads) in (set(heads), {*heads, *unread}) and (prefix == "Bert" or "next_sentence" not in heads):
            return name
    raise UserError(f"heads={config.heads} are those of no {prefix} architecture of transformers; leave some out")


def rename(prefix: str, name: str) -> str | None:
    """With the prefix that a bare model lacks, and without the gamma and beta of old."""
    if name.endswith(".position_ids"):
        return None
    name = re.sub(r"(?<=LayerNorm\.)gamma$", "weight", re.sub(r"(?<=LayerNorm\.)beta$", "bias", name))
    bare = name.startswith(("embeddings.", "encoder.", "transformer.", "pooler."))
    return f"{prefix}.{name}" if bare else name


BERT = Family(
    "bert", FIELDS, partial(rename, "bert"), _read, partial(write_config, "Bert", FIELDS), _names, fixed=FIXED
)
