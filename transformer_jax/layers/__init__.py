"""Parameters and the pure functions that use them: Flax modules as immutable pytrees."""

from transformer_jax.layers.attention import KeyValue, MultiHeadAttention
from transformer_jax.layers.block import Block, Cache, Residual, Weights
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.linear import Embedding, Linear
from transformer_jax.layers.norm import LayerNorm
from transformer_jax.layers.parameter import is_parameter, parameter
from transformer_jax.layers.stack import Stack

__all__ = [
    "Block",
    "Cache",
    "Embedding",
    "FeedForward",
    "KeyValue",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "Residual",
    "Stack",
    "Weights",
    "is_parameter",
    "parameter",
]
