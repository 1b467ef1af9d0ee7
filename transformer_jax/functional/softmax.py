"""Softmax and its logarithm: stable, maskable, in float32 inside."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def softmax(
    logits: Float[Array, "*shape"], mask: Bool[Array, "*#shape"] | None = None, *, axis: int = -1
) -> Float[Array, "*shape"]:
    """exp(x_i) / sum_j exp(x_j) over the entries where `mask` is True; zero elsewhere.

    The maximum is subtracted first, so no finite logit overflows. A row whose mask is False everywhere is exactly zero,
    and so is its gradient.
    """
    return _softmax(_mask_out(logits, mask), axis).astype(logits.dtype)


def log_softmax(
    logits: Float[Array, "*shape"], mask: Bool[Array, "*#shape"] | None = None, *, axis: int = -1
) -> Float[Array, "*shape"]:
    """x_i - log sum_j exp(x_j) over the entries where `mask` is True; -inf elsewhere, where the gradient is zero."""
    masked = _mask_out(logits, mask)
    shifted = masked - _finite_maximum(masked, axis)
    total = jnp.sum(jnp.exp(shifted), axis, keepdims=True)
    result = shifted - jnp.log(jnp.where(total == 0, 1, total))
    # The outer `where` cuts the gradient of the masked entries, which would otherwise flow through the total.
    return (result if mask is None else jnp.where(mask, result, -jnp.inf)).astype(logits.dtype)


def _mask_out(logits: Array, mask: Array | None) -> Array:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if mask is None:
        return logits
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean, True where attention is allowed; got {mask.dtype}")
    return jnp.where(mask, logits, -jnp.inf)


def _finite_maximum(x: Array, axis: int) -> Array:
    maximum = jnp.max(jax.lax.stop_gradient(x), axis, keepdims=True, initial=-jnp.inf)
    return jnp.where(maximum == -jnp.inf, 0, maximum)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(x: Array, axis: int) -> Array:
    powers = jnp.exp(x - _finite_maximum(x, axis))
    total = jnp.sum(powers, axis, keepdims=True)
    return powers / jnp.where(total == 0, 1, total)


@_softmax.defjvp
def _softmax_jvp(axis, primals, tangents):
    """dy = y * (dx - <y, dx>): one pass, and nothing but zeros where y is zero."""
    y, (dx,) = _softmax(*primals, axis), tangents
    return y, y * (dx - jnp.sum(y * dx, axis, keepdims=True))
