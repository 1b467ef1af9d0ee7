"""Dropout with explicit keys: one key for the whole array, or one for each row of the batch.

With a key per row, made from (seed, step, slot), the noise of an example does not depend on how the batch was divided
over devices or micro-batches.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(x: Float[Array, "B *shape"], rate: float, key: Key[Array, "#B"] | None) -> Float[Array, "B *shape"]:
    """x with each entry zeroed with chance `rate` and the others divided by 1 - rate (Srivastava et al. 2014).

    Without a key, or at rate 0, it is the identity. The rate is rounded to a multiple of 2^-16.
    """
    if key is None or rate == 0:
        return x
    if not 0 <= rate < 1:
        raise ValueError(f"the dropout rate must be at least 0 and below 1; got {rate}")
    threshold = round(rate * 2**16)
    if key.ndim:
        bits = jax.vmap(lambda row: jax.random.bits(row, x.shape[1:], jnp.uint16))(key)
    else:
        bits = jax.random.bits(key, x.shape, jnp.uint16)
    return jnp.where(bits >= threshold, x / (1 - threshold / 2**16), jnp.zeros_like(x))


def split(key: Key[Array, "*B"] | None, count: int) -> tuple[Key[Array, "*B"] | None, ...]:
    """`count` independent keys of each key; of no key, none."""
    if key is None:
        return (None,) * count
    if key.ndim:
        return tuple(jax.vmap(lambda row: jax.random.split(row, count), out_axes=1)(key))
    return tuple(jax.random.split(key, count))
