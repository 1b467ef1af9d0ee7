"""Architectures: one file each, with its config, its module and its named sizes."""

from transformer_jax.models.transformer import AttentionWeights, DecodingState, Transformer, TransformerConfig

__all__ = ["AttentionWeights", "DecodingState", "Transformer", "TransformerConfig"]
