"""XLNet checkpoints."""

from collections.abc import Mapping
from typing import Any

from transformer_jax.interop.family import (
    ACTIVATION,
    Family,
    blocks,
    norm,
    our_fields,
    require_config,
    table,
    their_fields,
)
from transformer_jax.interop.fields import (
    COUNT,
    ID,
    LARGEST_SIZE,
    LAYERS,
    POSITIVE,
    RATE,
    SIZE,
    Field,
    Json,
    choice,
    optional,
    require,
    whole_number,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.xlnet import XLNetConfig

FIELDS = {
    "vocab_size": Field(SIZE, "vocab_size"),
    "d_model": Field(SIZE, "d_model"),
    "n_head": Field(SIZE, "num_heads"),
    "d_head": Field(optional(SIZE), default=None),
    "d_inner": Field(SIZE, "d_ff"),
    "n_layer": Field(LAYERS, "num_layers"),
    "dropout": Field(RATE, "dropout_rate", 0.1),
    "ff_activation": Field(ACTIVATION, "activation", "gelu"),
    "layer_norm_eps": Field(POSITIVE, "norm_epsilon", 1e-12),
    "pad_token_id": Field(ID, "pad_id", 5),
    "mem_len": Field(optional(COUNT), "memory_length", 512),
    "clamp_len": Field(whole_number(-LARGEST_SIZE), default=-1),
    "attn_type": Field(choice(("bi", "uni")), default="bi"),
}
FIXED = {"bi_data": False, "same_length": False, "untie_r": True, "tie_word_embeddings": True, "reuse_len": None}
ALIASES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
ATTENTION = {"query": "q", "key": "k", "value": "v", "distance": "r"}
BIASES = {"content_bias": "r_w_bias", "distance_bias": "r_r_bias", "type_bias": "r_s_bias"}
LENGTH = 512  # of the texts that XLNet was trained on; the model itself has no limit


def _names(config: XLNetConfig) -> Names:
    layer, ours = "transformer.layer.{layer}", "encoder.blocks"
    attention, theirs = f"{ours}.self_attention", f"{layer}.rel_attn"
    weights = table("embedding", "transformer.word_embedding")
    weights["mask_embedding"] = Weight("transformer.mask_emb", "corner")
    weights |= {f"{attention}.{part}.weight": Weight(f"{theirs}.{name}", "as_is") for part, name in ATTENTION.items()}
    weights |= {f"{attention}.{part}": Weight(f"{theirs}.{name}", "as_is") for part, name in BIASES.items()}
    weights[f"{attention}.type_embedding"] = Weight(f"{theirs}.seg_embed", "as_is")
    weights[f"{attention}.output.weight"] = Weight(f"{theirs}.o", "outputs_first")
    weights |= norm(f"{ours}.self_attention_residual.norm", f"{theirs}.layer_norm")
    weights |= blocks(ours, f"{layer}.ff", {"feed_forward.input": "layer_1", "feed_forward.output": "layer_2"})
    weights |= norm(f"{ours}.feed_forward_residual.norm", f"{layer}.ff.layer_norm")
    if not config.lm_head:
        return Names(weights)
    weights["lm_head.bias"] = Weight("lm_loss.bias")
    return Names(weights, {"lm_loss.weight": "transformer.word_embedding.weight"})


def _read(json: Json, found: Mapping[str, Tensor]) -> XLNetConfig:
    require(json, {"d_head": json["d_model"] // json["n_head"]} if json["d_head"] else {})
    has_head = (json["architectures"] or [""])[0] == "XLNetLMHeadModel" or "lm_loss.bias" in found
    fields = our_fields(json, FIELDS)
    return XLNetConfig(
        **fields | {"memory_length": fields["memory_length"] or None},
        attention_dropout_rate=json["dropout"],
        max_length=LENGTH,
        max_distance=json["clamp_len"] if json["clamp_len"] > 0 else None,
        causal=json["attn_type"] == "uni",
        lm_head=has_head,
    )


def _write(config: XLNetConfig) -> dict[str, Any]:
    require_config(config, "XLNet", attention_dropout_rate=config.dropout_rate)
    return their_fields(config, FIELDS) | {
        "architectures": ["XLNetLMHeadModel" if config.lm_head else "XLNetModel"],
        "d_head": config.d_model // config.num_heads,
        "clamp_len": config.max_distance or -1,
        "attn_type": "uni" if config.causal else "bi",
    }


def _rename(name: str) -> str:
    return f"transformer.{name}" if name.startswith(("word_embedding.", "mask_emb", "layer.")) else name


XLNET = Family(
    "xlnet",
    FIELDS,
    _rename,
    _read,
    _write,
    _names,
    fixed=FIXED,
    aliases=ALIASES,
    special_ids={"bos_token_id": 1, "eos_token_id": 2},
)
