"""Marian checkpoints: the 2017 encoder-decoder, as the OPUS-MT translators have it; and what Pegasus shares with it."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interop.family import (
    ACTIVATION,
    Family,
    blocks,
    our_fields,
    require_config,
    table,
    their_fields,
)
from transformer_jax.interop.fields import FLAG, ID, LAYERS, RATE, SIZE, Field, Json, optional
from transformer_jax.interop.permutation import with_halved_sinusoids
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.layers import NormPlacement
from transformer_jax.models.transformer import TransformerConfig

FIELDS = {
    "vocab_size": Field(SIZE),
    "d_model": Field(SIZE, "d_model"),
    "encoder_attention_heads": Field(SIZE, "num_heads"),
    "encoder_ffn_dim": Field(SIZE, "d_ff"),
    "encoder_layers": Field(LAYERS, "num_encoder_layers"),
    "decoder_attention_heads": Field(SIZE),
    "decoder_ffn_dim": Field(SIZE),
    "decoder_layers": Field(LAYERS, "num_decoder_layers"),
    "dropout": Field(RATE, "dropout_rate", 0.1),
    "attention_dropout": Field(RATE, "attention_dropout_rate", 0.0),
    "activation_dropout": Field(RATE, "activation_dropout_rate", 0.0),
    "activation_function": Field(ACTIVATION, "activation", "gelu"),
    "max_position_embeddings": Field(SIZE, "max_length"),
    "scale_embedding": Field(FLAG, "scale_embedding", False),
    "pad_token_id": Field(ID, "pad_id"),
    "tie_word_embeddings": Field(FLAG, default=True),
}
"""The fields of both families."""
MARIAN_FIELDS = FIELDS | {
    "decoder_vocab_size": Field(optional(SIZE), default=None),
    "share_encoder_decoder_embeddings": Field(FLAG, default=True),
}
FIXED = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
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
EPSILON = 1e-5
"""Of the norms of all these models."""
SIDES = ("encoder", "decoder")


def names_of(config: TransformerConfig) -> Names:
    """The tensors of a model, of which those of the blocks and embeddings are called alike in both families."""
    weights = blocks("encoder.blocks", "model.encoder.layers.{layer}", BLOCK)
    weights |= blocks("decoder.blocks", "model.decoder.layers.{layer}", BLOCK | CROSS)
    if config.output_bias:
        weights["lm_head.bias"] = Weight("final_logits_bias", "row")
    copies: dict[str, str] = {}
    if config.tie_embeddings == "all":
        weights |= table("embedding", "model.shared")
        parts = (*(f"model.{side}.embed_tokens" for side in SIDES), "lm_head")
        copies = {f"{part}.weight": "model.shared.weight" for part in parts}
    else:
        weights |= table("embedding", "model.encoder.embed_tokens")
        weights |= table("target_embedding", "model.decoder.embed_tokens")
    if config.tie_embeddings == "target":
        copies = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    if config.tie_embeddings == "none":
        weights |= table("lm_head.output", "lm_head")
    positions = partial(_positions, config)
    return Names(weights, copies, {f"model.{side}.embed_positions.weight": positions for side in SIDES})


def _positions(config: TransformerConfig) -> np.ndarray:
    # In float64, as transformers does: what is written is the same to the last bit.
    half = config.d_model // 2
    angles = np.arange(config.max_length)[:, None] / 10_000 ** (np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def read_config(json: Json, found: Mapping[str, Tensor], norm: NormPlacement, **values: Any) -> TransformerConfig:
    """Our config for the fields that both families have, and these values."""
    for side in SIDES:  # before the sinusoids are computed, which may be a great many by a wrong word
        positions = found.get(f"model.{side}.embed_positions.weight")
        if positions is not None and positions.shape[:1] != (json["max_position_embeddings"],):
            given = f"max_position_embeddings={json['max_position_embeddings']}"
            raise UserError(f"config.json: {given}, but the {side}'s embed_positions have shape {positions.shape}")
    heads, d_ff = json["decoder_attention_heads"], json["decoder_ffn_dim"]
    return TransformerConfig(
        **our_fields(json, FIELDS),
        **values,
        decoder_num_heads=None if heads == json["encoder_attention_heads"] else heads,
        decoder_d_ff=None if d_ff == json["encoder_ffn_dim"] else d_ff,
        positions="sinusoidal",
        sinusoids="halved",
        norm=norm,
        norm_epsilon=EPSILON,
        output_bias="final_logits_bias" in found,
    )


def write_config(kind: str, config: TransformerConfig, **values: Any) -> dict[str, Any]:
    """The config.json of a config that has these values, as far as both families have the same fields."""
    require_config(config, kind, positions="sinusoidal", position_start=0, experts=None, **values)
    if config.sinusoids not in ("halved", "interleaved"):
        raise UserError(
            f"a model with sinusoids={config.sinusoids!r} cannot be saved: its kind of checkpoint, {kind}, has halved "
            "ones, which interleaved ones can be made into; train with either of the two"
        )
    if abs(config.norm_epsilon - EPSILON) > EPSILON:
        require_config(config, kind, norm_epsilon=EPSILON)
    if config.norm_epsilon != EPSILON:
        warnings.warn(
            f"norm_epsilon={config.norm_epsilon} is saved as {EPSILON}, the only one that {kind} checkpoints have: "
            "where the variance is 1, what a norm gives differs by at most 5e-6 of its size",
            stacklevel=4,
        )
    return their_fields(config, FIELDS) | {
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_attention_heads": config.decoder_num_heads or config.num_heads,
        "decoder_ffn_dim": config.decoder_d_ff or config.d_ff,
        "tie_word_embeddings": config.tie_embeddings != "none",
        "is_encoder_decoder": True,
    }


def _read(json: Json, found: Mapping[str, Tensor]) -> TransformerConfig:
    shared, tied = json["share_encoder_decoder_embeddings"], json["tie_word_embeddings"]
    if shared and not tied:
        raise UserError("config.json: an output layer of its own with shared embeddings cannot be loaded")
    source_size = json["vocab_size"]
    target_size = source_size if shared else json["decoder_vocab_size"] or source_size
    return read_config(
        json,
        found,
        norm="post",
        vocab_size=target_size,
        source_vocab_size=None if source_size == target_size else source_size,
        tie_embeddings="all" if shared else "target" if tied else "none",
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    return write_config("Marian", config, norm="post") | {
        "architectures": ["MarianMTModel"],
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
    }


def rename(name: str) -> str:
    """With the prefix that a model without a head lacks."""
    return f"model.{name}" if name.startswith(("shared.", "encoder.", "decoder.")) else name


MARIAN = Family(
    "marian",
    MARIAN_FIELDS,
    rename,
    _read,
    _write,
    names_of,
    fixed=FIXED,
    aliases=ALIASES,
    special_ids={"eos_token_id": 0, "forced_eos_token_id": 0},
    fit=with_halved_sinusoids,
)
