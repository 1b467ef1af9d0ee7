"""Attention: a weighted mean of values, the weights a softmax of how well each query fits each key."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from transformer_jax.functional.dropout import dropout
from transformer_jax.functional.linear import wide_einsum
from transformer_jax.functional.masks import Mask, as_mask
from transformer_jax.functional.precision import matmul_precision
from transformer_jax.functional.softmax import softmax

Implementation = Literal["reference"]
"""Ways to compute the same attention. `reference` is the definition; every other must agree with it."""

AttentionOutput = Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]


def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    mask: Mask | Array | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, "..."] | None = None,
    return_weights: bool = False,
    implementation: Implementation = "reference",
) -> AttentionOutput:
    """softmax(QK^T / sqrt(H) + bias) V (Vaswani et al. 2017, equation 1).

    Args:
        query: what is looked for.
        key: what can be found; K heads, each shared by N / K query heads.
        value: what is read where it is found.
        mask: a mask value, or a boolean array that is True where attention is allowed. A query that may attend to
            nothing gives zero.
        bias: added to the scores, after scaling.
        scale: multiplies the scores; 1 / sqrt(H) by default.
        dropout_rate: probability that a weight is dropped, when there is a `dropout_key`.
        dropout_key: one key, or one for each row of the batch.
        return_weights: also return the weights, as they were before dropout.
        implementation: how it is computed.
    """
    _check(query, key, value)
    if implementation not in _IMPLEMENTATIONS:
        known = ", ".join(map(repr, _IMPLEMENTATIONS))
        raise ValueError(f"implementation={implementation!r} is unknown; choose {known}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attention = _IMPLEMENTATIONS[implementation]
    return attention(query, key, value, mask, bias, scale, dropout_rate, dropout_key, return_weights)


def multiplicative_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    mask: Mask | Array | None = None,
    return_weights: bool = False,
) -> AttentionOutput:
    """softmax(QK^T) V: the dot product of Luong et al. 2015, without a scale."""
    return dot_product_attention(query, key, value, mask=mask, scale=1.0, return_weights=return_weights)


def additive_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N E"],
    value: Float[Array, "B S N V"],
    query_weight: Float[Array, "H A"],
    key_weight: Float[Array, "E A"],
    score_weight: Float[Array, "A"],
    *,
    mask: Mask | Array | None = None,
    return_weights: bool = False,
) -> AttentionOutput:
    """softmax(v^T tanh(W q + U k)) V (Bahdanau et al. 2015): W is `query_weight`, U `key_weight`, v `score_weight`."""
    _check(query, key, value, same_size=False)
    precision = matmul_precision(query.dtype)
    projected_query = jnp.einsum("BTNH,HA->BNTA", query, query_weight, precision=precision)
    projected_key = jnp.einsum("BSNE,EA->BNSA", key, key_weight, precision=precision)
    hidden = jnp.tanh(projected_query[:, :, :, None, :] + projected_key[:, :, None, :, :])
    scores = jnp.einsum("BNTSA,A->BNTS", hidden, score_weight, precision=precision)
    context, weights = _attend(scores, value, mask, None, 0.0, None)
    return (context, weights) if return_weights else context


def _reference(query, key, value, mask, bias, scale, dropout_rate, dropout_key, return_weights) -> AttentionOutput:
    # The backward pass computes the weights again: kept, they would be most of what a long sequence needs.
    @partial(jax.checkpoint, prevent_cse=False)
    def attend(query, key, value):
        # The scores are float32, the query may be bfloat16: to scale that would round it once more.
        scores = _scores(query, key) * scale
        return _attend(scores, value, mask, bias, dropout_rate, dropout_key)

    context, weights = attend(query, key, value)
    return (context, weights) if return_weights else context


_IMPLEMENTATIONS = {"reference": _reference}


def _attend(scores, value, mask, bias, dropout_rate, dropout_key) -> tuple[Array, Array]:
    """From scores to the mean of the values, and the weights: the half that all attentions share."""
    if bias is not None:
        scores = scores + bias
    allowed = None if mask is None else as_mask(mask).array(*scores.shape[-2:])
    weights = softmax(scores, allowed).astype(value.dtype)
    kept = dropout(weights, dropout_rate, dropout_key)
    return _mean(kept, value), weights


def _scores(query: Float[Array, "B T N H"], key: Float[Array, "B S K H"]) -> Float[Array, "B N T S"]:
    """QK^T, in float32 at least."""
    (num_rows, num_queries, num_heads, size), shared = query.shape, key.shape[2]
    if num_heads == shared:
        return wide_einsum("BTNH,BSNH->BNTS", query, key)
    grouped = query.reshape(num_rows, num_queries, shared, num_heads // shared, size)
    return wide_einsum("BTKGH,BSKH->BKGTS", grouped, key).reshape(num_rows, num_heads, num_queries, key.shape[1])


def _mean(weights: Float[Array, "B N T S"], value: Float[Array, "B S K V"]) -> Float[Array, "B T N V"]:
    """The mean of the values by these weights."""
    einsum = partial(jnp.einsum, precision=matmul_precision(value.dtype))
    (num_rows, num_heads, num_queries, num_keys), shared = weights.shape, value.shape[2]
    if num_heads == shared:
        return einsum("BNTS,BSNV->BTNV", weights, value)
    grouped = weights.reshape(num_rows, shared, num_heads // shared, num_queries, num_keys)
    context = einsum("BKGTS,BSKV->BTKGV", grouped, value)
    return context.reshape(num_rows, num_queries, num_heads, value.shape[-1])


def _check(query: Array, key: Array, value: Array, *, same_size: bool = True) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"{name} needs the axes [batch, length, heads, head size]; got shape {array.shape}")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query has batch {query.shape[0]}, key {key.shape[0]} and value {value.shape[0]}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key has (length, heads) {key.shape[1:3]} but value has {value.shape[1:3]}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query has {query.shape[2]} heads, which is not a multiple of the key's {key.shape[2]}")
    if same_size and query.shape[3] != key.shape[3]:
        raise ValueError(f"query has head size {query.shape[3]} but key has {key.shape[3]}")
