"""The precision that a model computes in. Its parameters are float32."""

from typing import Literal

import jax
import jax.numpy as jnp

Precision = Literal["auto", "float32", "bfloat16"]
"""auto is bfloat16 on TPU and GPU, float32 on CPU."""


def compute_dtype(precision: Precision) -> jnp.dtype:
    """What a precision is on this machine."""
    if precision == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(precision)
