"""Parameters and the pure functions that use them: Flax modules as immutable pytrees."""

from transformer_jax.layers.attention import KeyValue, MultiHeadAttention, Rotary
from transformer_jax.layers.block import Block, NormPlacement, Residual, Seen
from transformer_jax.layers.experts import Experts, ExpertsConfig, balance_loss, feed_forward_or_experts
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.linear import Embedding, Linear, places
from transformer_jax.layers.norm import LayerNorm, Norm, RMSNorm
from transformer_jax.layers.parameter import (
    fan_in_normal,
    glorot_uniform,
    is_parameter,
    normal,
    parameter,
    same_normal,
    scaled,
    zeros,
)
from transformer_jax.layers.relative_attention import RelativeAttention, RelativeBlock, View
from transformer_jax.layers.stack import Rematerialize, Stack

__all__ = [
    "Block",
    "Embedding",
    "Experts",
    "ExpertsConfig",
    "FeedForward",
    "KeyValue",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "Norm",
    "NormPlacement",
    "RMSNorm",
    "RelativeAttention",
    "RelativeBlock",
    "Rematerialize",
    "Residual",
    "Rotary",
    "Seen",
    "Stack",
    "View",
    "balance_loss",
    "fan_in_normal",
    "feed_forward_or_experts",
    "glorot_uniform",
    "is_parameter",
    "normal",
    "parameter",
    "places",
    "same_normal",
    "scaled",
    "zeros",
]
