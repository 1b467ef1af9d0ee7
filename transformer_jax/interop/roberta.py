"""RoBERTa checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from transformer_jax.interop.bert import BLOCK, FIELDS, FIXED, heads_of, names_of, read_config, rename, write_config
from transformer_jax.interop.family import Family, blocks, linear, norm
from transformer_jax.interop.fields import ID, Field, Json
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.bert import BertConfig, BertHead


def _names(config: BertConfig) -> Names:
    pooler = "classifier.dense" if "classifier" in config.heads else "roberta.pooler.dense"
    heads: dict[BertHead, dict[str, Weight]] = {
        "pooler": linear("pooler.output", pooler),
        "masked_lm": linear("lm_head.transform", "lm_head.dense")
        | norm("lm_head.norm", "lm_head.layer_norm")
        | {"lm_head.bias": Weight("lm_head.bias")},
        "classifier": linear("classification_head.output", "classifier.out_proj"),
        "tagger": linear("tagging_head.output", "classifier"),
        "span": linear("span_head.output", "qa_outputs"),
    }
    copies = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    names = names_of("roberta", config, blocks("encoder.blocks", "roberta.encoder.layer.{layer}", BLOCK), heads, copies)
    if "classifier" not in config.heads:
        return names
    # What was trained from an older checkpoint still has its pooler, though the classifier came with another.
    return replace(names, unread=("roberta.pooler.dense.weight", "roberta.pooler.dense.bias"))


def _read(json: Json, found: Mapping[str, Tensor]) -> BertConfig:
    shown_by: dict[BertHead, str] = {
        "pooler": "roberta.pooler.",
        "masked_lm": "lm_head.",
        "classifier": "classifier.out_proj.",
        "tagger": "classifier.weight",
        "span": "qa_outputs.",
    }
    return read_config(json, position_start=json["pad_token_id"] + 1, heads=heads_of("Roberta", json, found, shown_by))


def _write(config: BertConfig) -> dict[str, Any]:
    start = (config.pad_id or 0) + 1
    return write_config("Roberta", FIELDS, config, position_start=start, num_types=config.num_types or 1)


ROBERTA = Family(
    "roberta",
    FIELDS | {"pad_token_id": Field(ID, "pad_id", 1)},
    partial(rename, "roberta"),
    _read,
    _write,
    _names,
    fixed=FIXED,
    special_ids={"bos_token_id": 0, "eos_token_id": 2},
)
