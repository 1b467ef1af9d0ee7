"""Dropout with explicit keys: one key for the whole array, or one for each row of the batch.

With a key per row, made from (seed, step, slot), the noise of an example does not depend on how the batch was divided
over devices or micro-batches.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, UInt32


def dropout(x: Float[Array, "B *shape"], rate: float, key: Key[Array, "#B"] | None) -> Float[Array, "B *shape"]:
    """x with each entry zeroed with probability `rate` and the others divided by 1 - rate (Srivastava et al. 2014).

    Without a key, or at rate 0, it is the identity.
    """
    if key is None or rate == 0:
        return x
    if key.ndim:
        return _drop(x, salts(key), rate)
    return _drop(x[None], salts(key), rate)[0]


def split(key: Key[Array, "*B"] | None, count: int) -> tuple[Key[Array, "*B"] | None, ...]:
    """`count` independent keys of each key; of no key, none."""
    if key is None:
        return (None,) * count
    if key.ndim:
        return tuple(jax.vmap(lambda row: jax.random.split(row, count), out_axes=1)(key))
    return tuple(jax.random.split(key, count))


# The backward pass computes the mask again: a few integer operations cost less than to write it and read it back.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _drop(x: Float[Array, "B *shape"], salt: UInt32[Array, "B 2"], rate: float) -> Float[Array, "B *shape"]:
    index = jax.lax.iota(jnp.uint32, math.prod(x.shape[1:])).reshape(1, *x.shape[1:])
    return drop_at(x, salt, index, rate)


def salts(key: Key[Array, "*B"]) -> UInt32[Array, "B 2"]:
    """The words that the noise of each row is made from; of one key, those of one row."""
    return jax.vmap(lambda row: jax.random.bits(row, (2,), jnp.uint32))(key if key.ndim else key[None])


def drop_at(
    x: Float[Array, "B *shape"], salt: UInt32[Array, "#B 2"], index: UInt32[Array, "#B *shape"], rate: float
) -> Float[Array, "B *shape"]:
    """x with dropout, where each entry has this index in its row: a block of a row is dropped as the row would be."""
    if not 0 <= rate < 1:
        raise ValueError(f"the dropout rate must be at least 0 and below 1; got {rate}")
    return jnp.where(_keep(salt, index, rate), x * (1 / (1 - rate)), jnp.zeros_like(x))


def _keep(salt: UInt32[Array, "#B 2"], index: UInt32[Array, "#B *shape"], rate: float) -> Bool[Array, "#B *shape"]:
    """True with probability 1 - rate: a hash of the index in the row and of the row's salt.

    The salt comes from JAX's generator; to run that generator for every entry would cost more than the matrix products
    of a small model. A hash is a function of the index alone, so it is fused into whatever uses the mask.
    """
    first, second = (jnp.expand_dims(word, tuple(range(1, index.ndim))) for word in (salt[:, 0], salt[:, 1]))
    start = index + first
    word = _mix((start ^ (start >> 16)) * jnp.uint32(0x7FEB352D) ^ second)
    return word >= jnp.uint32(round(rate * 2**32))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32-bit words in which every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
