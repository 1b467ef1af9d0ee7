"""Parameters and the pure functions that use them: Flax modules as immutable pytrees."""

from transformer_jax.layers.attention import KeyValue, MultiHeadAttention, Rotary
from transformer_jax.layers.block import AuxiliaryOutputs, Block, NormPlacement, Residual
from transformer_jax.layers.experts import Experts, ExpertsConfig, balance_loss, feed_forward_or_experts
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.heads import (
    ClassificationHead,
    LanguageModelHead,
    PairHead,
    Pooler,
    SpanHead,
    TaggingHead,
    last_valid,
)
from transformer_jax.layers.linear import Embedding, Linear, position_indices
from transformer_jax.layers.norm import LayerNorm, Norm, RMSNorm
from transformer_jax.layers.parameter import (
    fan_in_normal,
    glorot_uniform,
    is_parameter,
    is_stacked,
    map_named_parameters,
    named_parameters,
    normal,
    parameter,
    same_normal,
    scaled,
    zeros,
)
from transformer_jax.layers.relative_attention import RelativeAttention, RelativeBlock, StreamMask
from transformer_jax.layers.stack import Rematerialize, Stack

__all__ = [
    "AuxiliaryOutputs",
    "Block",
    "ClassificationHead",
    "Embedding",
    "Experts",
    "ExpertsConfig",
    "FeedForward",
    "KeyValue",
    "LanguageModelHead",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "Norm",
    "NormPlacement",
    "PairHead",
    "Pooler",
    "RMSNorm",
    "RelativeAttention",
    "RelativeBlock",
    "Rematerialize",
    "Residual",
    "Rotary",
    "SpanHead",
    "Stack",
    "StreamMask",
    "TaggingHead",
    "balance_loss",
    "fan_in_normal",
    "feed_forward_or_experts",
    "glorot_uniform",
    "is_parameter",
    "is_stacked",
    "last_valid",
    "map_named_parameters",
    "named_parameters",
    "normal",
    "parameter",
    "position_indices",
    "same_normal",
    "scaled",
    "zeros",
]
