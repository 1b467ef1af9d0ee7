"""GPT-2 checkpoints."""

import re
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.interop.bert import label_fields, labels_of
from transformer_jax.interop.family import (
    ACTIVATION,
    Family,
    has_head,
    linear,
    norm,
    our_fields,
    require_config,
    table,
    their_fields,
)
from transformer_jax.interop.fields import (
    FLAG,
    LABELS,
    LAYERS,
    POSITIVE,
    RATE,
    SIZE,
    Field,
    Json,
    optional,
    require_equal,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.gpt import GPTConfig, GPTHead

FIELDS = {
    "vocab_size": Field(SIZE, "vocab_size"),
    "n_embd": Field(SIZE, "d_model"),
    "n_head": Field(SIZE, "num_heads"),
    "n_layer": Field(LAYERS, "num_layers"),
    "n_positions": Field(SIZE, "max_length"),
    "n_inner": Field(optional(SIZE), default=None),
    "resid_pdrop": Field(RATE, "dropout_rate", 0.1),
    "embd_pdrop": Field(RATE, default=0.1),
    "attn_pdrop": Field(RATE, "attention_dropout_rate", 0.1),
    "activation_function": Field(ACTIVATION, "activation", "gelu_new"),
    "layer_norm_epsilon": Field(POSITIVE, "norm_epsilon", 1e-5),
    "tie_word_embeddings": Field(FLAG, "tie_embeddings", True),
    "id2label": Field(optional(LABELS), default=None),
    "num_labels": Field(optional(SIZE), default=None),
    "classifier_dropout": Field(optional(RATE), default=None),
    "hidden_dropout": Field(optional(RATE), default=None),
}
ARCHITECTURES: dict[str, tuple[GPTHead, ...]] = {
    "GPT2ForSequenceClassification": ("classifier",),
    "GPT2ForTokenClassification": ("tagger",),
}
"""The heads of an architecture; all others have none but the output layer."""
TAGGER_DROPOUT_RATE = 0.1  # of a config.json that does not say it
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _names(config: GPTConfig) -> Names:
    layer, ours = "transformer.h.{layer}", "decoder.blocks"
    weights = table("embedding", "transformer.wte") | table("position_embedding", "transformer.wpe")
    for part, name in enumerate(("query", "key", "value")):  # one after the other in one tensor
        path = f"{ours}.self_attention.{name}"
        weights[f"{path}.weight"] = Weight(f"{layer}.attn.c_attn.weight", "inputs_first", (part, 3))
        weights[f"{path}.bias"] = Weight(f"{layer}.attn.c_attn.bias", part=(part, 3))
    for path, name in (
        ("self_attention.output", "attn.c_proj"),
        ("feed_forward.input", "mlp.c_fc"),
        ("feed_forward.output", "mlp.c_proj"),
    ):
        weights[f"{ours}.{path}.weight"] = Weight(f"{layer}.{name}.weight", "inputs_first")
        weights[f"{ours}.{path}.bias"] = Weight(f"{layer}.{name}.bias")
    weights |= norm(f"{ours}.self_attention_residual.norm", f"{layer}.ln_1")
    weights |= norm(f"{ours}.feed_forward_residual.norm", f"{layer}.ln_2") | norm("norm", "transformer.ln_f")
    if "classifier" in config.heads:
        weights |= linear("classification_head.output", "score", bias=False)
    if "tagger" in config.heads:
        weights |= linear("tagging_head.output", "classifier")
    return with_output(config, weights, "transformer.wte.weight")


def with_output(config: GPTConfig, weights: dict[str, Weight], embedding: str) -> Names:
    """The tensors of a decoder, with those of its output layer."""
    if config.tie_embeddings:
        return Names(weights, {"lm_head.weight": embedding})
    return Names(weights | table("lm_head.output", "lm_head") if config.lm_head else weights)


def _read(json: Json, found: Mapping[str, Tensor]) -> GPTConfig:
    require_equal(json, "embd_pdrop", "resid_pdrop")
    heads, tied = ARCHITECTURES.get((json["architectures"] or [""])[0], ()), json["tie_word_embeddings"]
    return GPTConfig(
        **our_fields(json, FIELDS),
        lm_head=tied if heads else has_head(json, found, bare="GPT2Model", tied=tied),
        heads=heads,
        head_dropout_rate=_tagger_dropout_rate(json) if "tagger" in heads else 0.0,
        **labels_of(json, heads),
        d_ff=json["n_inner"] or 4 * json["n_embd"],
        gated=False,
        norm="layer",
        positions="learned",
        attention_bias=True,
        feed_forward_bias=True,
    )


def _tagger_dropout_rate(json: Json) -> float:
    said = (json["classifier_dropout"], json["hidden_dropout"], TAGGER_DROPOUT_RATE)
    return next(rate for rate in said if rate is not None)


def _write(config: GPTConfig) -> dict[str, Any]:
    require_config(
        config,
        "GPT-2",
        gated=False,
        norm="layer",
        experts=None,
        attention_bias=True,
        feed_forward_bias=True,
        size_of_head=config.d_model // config.num_heads,
        num_key_heads=config.num_heads if config.num_key_heads else None,
    )
    rest = {"architectures": [_architecture(config)], "n_inner": config.d_ff, "embd_pdrop": config.dropout_rate}
    if "tagger" in config.heads:
        rest["classifier_dropout"] = config.head_dropout_rate
    return their_fields(config, FIELDS) | rest | label_fields(config)


def _architecture(config: GPTConfig) -> str:
    if not config.heads:
        return "GPT2LMHeadModel" if config.lm_head else "GPT2Model"
    if config.lm_head and not config.tie_embeddings:
        raise UserError("no GPT-2 architecture of transformers has both heads and lm_head=True; set lm_head=False")
    if "classifier" in config.heads:  # which drops nothing there
        require_config(config, "GPT-2's classifier", head_dropout_rate=0.0)
    for name, heads in ARCHITECTURES.items():
        if config.heads == heads:
            return name
    raise UserError(f"heads={config.heads} are those of no GPT-2 architecture of transformers; leave some out")


def _rename(name: str) -> str | None:
    if re.search(r"\.attn\.(bias|masked_bias)$", name):  # masks that old checkpoints have among their weights
        return None
    return f"transformer.{name}" if name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name


GPT2 = Family(
    "gpt2",
    FIELDS,
    _rename,
    _read,
    _write,
    _names,
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    aliases=ALIASES,
    special_ids={"bos_token_id": 50_256, "eos_token_id": 50_256},
)
