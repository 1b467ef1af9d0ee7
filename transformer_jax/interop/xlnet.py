"""XLNet checkpoints."""

from collections.abc import Mapping
from typing import Any

from transformer_jax.interop.family import Family, Json, blocks, norm, read_fields, require, table, write_fields
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.xlnet import XLNetConfig

FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "num_heads": "n_head",
    "d_ff": "d_inner",
    "num_layers": "n_layer",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "dropout",
    "activation": "ff_activation",
    "norm_epsilon": "layer_norm_eps",
    "pad_id": "pad_token_id",
    "memory_length": "mem_len",
}
DEFAULTS = {
    "vocab_size": 32_000,
    "d_model": 1024,
    "n_head": 16,
    "d_inner": 4096,
    "n_layer": 24,
    "dropout": 0.1,
    "ff_activation": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 5,
    "mem_len": 512,
    "clamp_len": -1,
    "attn_type": "bi",
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
    weights["output_bias"] = Weight("lm_loss.bias")
    return Names(weights, {"lm_loss.weight": "transformer.word_embedding.weight"})


def _read(json: Json, found: Mapping[str, Tensor]) -> XLNetConfig:
    require(json, bi_data=False, same_length=False, untie_r=True, tie_word_embeddings=True)
    require(json, d_head=json["d_model"] // json["n_head"])
    require({**json, "reuse_len": json.get("reuse_len") or None}, reuse_len=None)
    if json["attn_type"] != "uni":
        require(json, attn_type="bi")
    has_head = (json.get("architectures") or [""])[0] == "XLNetLMHeadModel" or "lm_loss.bias" in found
    fields = read_fields(json, FIELDS)
    return XLNetConfig(
        **fields | {"memory_length": fields["memory_length"] or None},
        max_length=LENGTH,
        max_distance=json["clamp_len"] if json["clamp_len"] > 0 else None,
        causal=json["attn_type"] == "uni",
        lm_head=has_head,
    )


def _write(config: XLNetConfig) -> dict[str, Any]:
    return write_fields(config, FIELDS) | {
        "architectures": ["XLNetLMHeadModel" if config.lm_head else "XLNetModel"],
        "d_head": config.d_model // config.num_heads,
        "clamp_len": config.max_distance or -1,
        "attn_type": "uni" if config.causal else "bi",
        "dropout": config.dropout_rate,
    }


def _rename(name: str) -> str:
    return f"transformer.{name}" if name.startswith(("word_embedding.", "mask_emb", "layer.")) else name


XLNET = Family("xlnet", DEFAULTS, _rename, _read, _write, _names)
