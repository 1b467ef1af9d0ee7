"""Marian checkpoints: the 2017 encoder-decoder, as the OPUS-MT translators have it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.functional import sinusoidal
from transformer_jax.interop.family import (
    Family,
    Json,
    blocks,
    read_fields,
    require,
    require_config,
    table,
    write_fields,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.transformer import TransformerConfig

FIELDS = {
    "d_model": "d_model",
    "num_heads": "encoder_attention_heads",
    "d_ff": "encoder_ffn_dim",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
    "activation_dropout_rate": "activation_dropout",
    "activation": "activation_function",
    "max_length": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
    "pad_id": "pad_token_id",
}
DEFAULTS = {
    "vocab_size": 58_101,
    "decoder_vocab_size": None,
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "pad_token_id": 58_100,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
BLOCK = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.output": "self_attn.out_proj",
    "self_attention_residual.norm": "self_attn_layer_norm",
    "feed_forward.input": "fc1",
    "feed_forward.output": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
}
CROSS = {
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_residual.norm": "encoder_attn_layer_norm",
}
FIXED = {"positions": "sinusoidal", "sinusoids": "halved", "position_start": 0, "norm": "post", "norm_epsilon": 1e-5}
"""What all Marian models have."""
BARE = "MarianModel"
"""What has no bias of the logits."""


def _names(config: TransformerConfig) -> Names:
    weights = blocks("encoder.blocks", "model.encoder.layers.{layer}", BLOCK)
    weights |= blocks("decoder.blocks", "model.decoder.layers.{layer}", BLOCK | CROSS)
    if config.output_bias:
        weights["output_bias"] = Weight("final_logits_bias", "row")
    copies: dict[str, str] = {}
    if config.tie_embeddings == "all":
        weights |= table("embedding", "model.shared")
        parts = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
        copies = {f"{part}.weight": "model.shared.weight" for part in parts}
    else:
        weights |= table("embedding", "model.encoder.embed_tokens")
        weights |= table("target_embedding", "model.decoder.embed_tokens")
    if config.tie_embeddings == "target":
        copies = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    if config.tie_embeddings == "none":
        weights |= table("output", "lm_head")
    positions = partial(_positions, config)
    return Names(
        weights, copies, {f"model.{side}.embed_positions.weight": positions for side in ("encoder", "decoder")}
    )


def _positions(config: TransformerConfig) -> np.ndarray:
    return np.asarray(sinusoidal(jnp.arange(config.max_length), config.d_model, variant="halved"))


def _read(json: Json, found: Mapping[str, Tensor]) -> TransformerConfig:
    for part in ("attention_heads", "ffn_dim"):
        require(json, **{f"decoder_{part}": json[f"encoder_{part}"]})
    shared, tied = json["share_encoder_decoder_embeddings"], json["tie_word_embeddings"]
    if shared and not tied:
        raise UserError("config.json: an output layer of its own with shared embeddings cannot be loaded")
    target_size = json["vocab_size"] if shared else json["decoder_vocab_size"] or json["vocab_size"]
    return TransformerConfig(
        **read_fields(json, FIELDS),
        **FIXED,  # type: ignore[arg-type]
        vocab_size=target_size,
        source_vocab_size=None if shared else json["vocab_size"],
        tie_embeddings="all" if shared else "target" if tied else "none",
        output_bias="final_logits_bias" in found or json.get("architectures") != [BARE],
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    require_config(config, "Marian", **FIXED, experts=None)
    return write_fields(config, FIELDS) | {
        "architectures": ["MarianMTModel" if config.output_bias else BARE],
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.d_ff,
        "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
        "tie_word_embeddings": config.tie_embeddings != "none",
        "decoder_start_token_id": config.pad_id,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "is_encoder_decoder": True,
    }


def _rename(name: str) -> str:
    return f"model.{name}" if name.startswith(("shared.", "encoder.", "decoder.")) else name


MARIAN = Family("marian", DEFAULTS, _rename, _read, _write, _names)
