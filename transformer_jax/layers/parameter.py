"""One declaration per weight: its axes by name and size, its initializer, whether weight decay applies."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Axes = dict[str, int]
"""Logical axis names and their sizes, in order: `{"embed": 512, "heads": 8, "head": 64}`."""

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]

ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros
normal = jax.nn.initializers.normal


def parameter(rngs: nnx.Rngs, axes: Axes, initializer: Initializer, *, decay: bool) -> nnx.Param:
    """A float32 weight that knows its logical axes and whether it decays."""
    value = initializer(rngs.params(), tuple(axes.values()), jnp.float32)
    return nnx.Param(value, axes=tuple(axes), decay=decay)


def glorot_uniform(num_inputs: int) -> Initializer:
    """Uniform with variance 2 / (fan in + fan out); the first `num_inputs` axes are inputs (Glorot, Bengio 2010)."""

    def initialize(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        fan_in, fan_out = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
        limit = (6 / (fan_in + fan_out)) ** 0.5
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return initialize


def is_parameter(leaf: object) -> bool:
    """Whether a node of a model is a declared weight: the `is_leaf` for maps over declarations."""
    return isinstance(leaf, nnx.Param)
