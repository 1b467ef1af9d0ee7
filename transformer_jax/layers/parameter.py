"""One declaration per weight: its axes by name and size, how it is initialized, whether weight decay applies."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Axes = dict[str, int]
"""Logical axis names and their sizes, in order: `{"embed": 512, "heads": 8, "head": 64}`."""

Initializer = Callable[[Array, tuple[int, ...], jnp.dtype], Array]

LinearInitializer = Callable[[int], Initializer]
"""The initializer of a linear map, given how many of the leading axes of its weight are inputs: fan in is theirs."""

ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros
normal = jax.nn.initializers.normal


def parameter(
    rngs: nnx.Rngs, axes: Axes, initializer: Initializer, *, decay: bool, num_inputs: int | None = None
) -> nnx.Param:
    """A float32 weight that knows its logical axes, whether it decays, and which axes of a linear map are inputs."""
    value = initializer(rngs.params(), tuple(axes.values()), jnp.float32)
    return nnx.Param(value, axes=tuple(axes), decay=decay, num_inputs=num_inputs)


def glorot_uniform(num_inputs: int) -> Initializer:
    """Uniform with variance 2 / (fan in + fan out) (Glorot, Bengio 2010)."""

    def initialize(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        fan_in, fan_out = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
        limit = (6 / (fan_in + fan_out)) ** 0.5
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return initialize


def fan_in_normal(num_inputs: int) -> Initializer:
    """Normal with variance 1 / fan in (LeCun et al. 1998)."""
    return lambda key, shape, dtype: normal(math.prod(shape[:num_inputs]) ** -0.5)(key, shape, dtype)


def same_normal(standard_deviation: float) -> LinearInitializer:
    """Normal with the same standard deviation for every weight."""
    return lambda num_inputs: normal(standard_deviation)


def scaled(initializer: LinearInitializer, factor: float) -> LinearInitializer:
    """An initializer whose weights are all `factor` times as large."""
    return lambda num_inputs: lambda key, shape, dtype: factor * initializer(num_inputs)(key, shape, dtype)


def is_parameter(leaf: object) -> bool:
    """Whether a node of a model is a declared weight: the `is_leaf` for maps over declarations."""
    return isinstance(leaf, nnx.Param)


def is_stacked(weight: Any) -> bool:
    """Whether a declared weight is of a stack: its first axis counts the layers."""
    return getattr(weight, "axes", ())[:1] == ("layers",)


def map_named_parameters(function: Callable[[str, Any], Any], model: Any) -> Any:
    """A model with a function of its name and itself in place of each declared weight."""

    def call(path: Any, leaf: Any) -> Any:
        return function(jax.tree_util.keystr(path, simple=True, separator="."), leaf)

    return jax.tree_util.tree_map_with_path(call, model, is_leaf=is_parameter)


def named_parameters(model: Any) -> dict[str, Any]:
    """Each declared weight of a model by its path: `encoder.blocks.self_attention.query.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_parameter)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
