"""How exactly matrix products are computed."""

import jax
import jax.numpy as jnp


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """The precision of products of arrays of this dtype: float32 means float32.

    By default a TPU multiplies float32 as bfloat16, and a recent GPU as TensorFloat-32. Here it is asked for all bits,
    unless JAX has been told otherwise, with `jax.default_matmul_precision`: then that holds.
    """
    told = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if told is None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32:
        return jax.lax.Precision.HIGHEST
    return None
