"""Normalization over the features, in float32 inside."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The backward pass computes a norm again from x: that is cheaper than to keep what is between.
_again_in_backward = partial(jax.checkpoint, prevent_cse=False)


def layer_norm(
    x: Float[Array, "*shape D"],
    scale: Float[Array, "D"] | None = None,
    bias: Float[Array, "D"] | None = None,
    *,
    epsilon: float,
) -> Float[Array, "*shape D"]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016)."""

    @_again_in_backward
    def norm(x, scale, bias):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # The variance of the centred values: E[x^2] - E[x]^2 would cancel to noise when the mean is large.
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
        return _affine(centred * jax.lax.rsqrt(variance + epsilon), scale, bias).astype(x.dtype)

    return norm(x, scale, bias)


def rms_norm(
    x: Float[Array, "*shape D"], scale: Float[Array, "D"] | None = None, *, epsilon: float
) -> Float[Array, "*shape D"]:
    """x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich 2019)."""

    @_again_in_backward
    def norm(x, scale):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        square = jnp.mean(jnp.square(wide), -1, keepdims=True)
        return _affine(wide * jax.lax.rsqrt(square + epsilon), scale, None).astype(x.dtype)

    return norm(x, scale)


def _affine(x: Array, scale: Array | None, bias: Array | None) -> Array:
    leading = tuple(range(x.ndim - 1))
    if scale is not None:
        x = x * jnp.expand_dims(scale, leading)
    return x if bias is None else x + jnp.expand_dims(bias, leading)
