"""The equations: pure functions from arrays to arrays, each written once.

Axis letters: B batch, T query, S key, N heads, K key/value heads, H head size, D model, F feed-forward, V vocabulary.
"""

from transformer_jax.functional.attention import additive_attention, dot_product_attention, multiplicative_attention
from transformer_jax.functional.dropout import dropout
from transformer_jax.functional.experts import Balance, mixture_of_experts
from transformer_jax.functional.feed_forward import feed_forward
from transformer_jax.functional.linear import embed, linear
from transformer_jax.functional.losses import chunked_cross_entropy, chunked_sums, cross_entropy
from transformer_jax.functional.masks import (
    Mask,
    anti_causal,
    arbitrary,
    as_mask,
    causal,
    padding,
    segments,
    window,
)
from transformer_jax.functional.norms import layer_norm, rms_norm
from transformer_jax.functional.positions import (
    RotaryScaling,
    alibi_bias,
    alibi_slopes,
    relative_buckets,
    rotary,
    rotary_frequencies,
    segment_positions,
    sinusoidal,
)
from transformer_jax.functional.relative import (
    relative_distances,
    relative_position_scores,
    relative_shift,
    segment_scores,
)
from transformer_jax.functional.softmax import log_softmax, softmax

__all__ = [
    "Balance",
    "Mask",
    "RotaryScaling",
    "additive_attention",
    "alibi_bias",
    "alibi_slopes",
    "anti_causal",
    "arbitrary",
    "as_mask",
    "causal",
    "chunked_cross_entropy",
    "chunked_sums",
    "cross_entropy",
    "dot_product_attention",
    "dropout",
    "embed",
    "feed_forward",
    "layer_norm",
    "linear",
    "log_softmax",
    "mixture_of_experts",
    "multiplicative_attention",
    "padding",
    "relative_buckets",
    "relative_distances",
    "relative_position_scores",
    "relative_shift",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "segment_positions",
    "segment_scores",
    "segments",
    "sinusoidal",
    "softmax",
    "window",
]
