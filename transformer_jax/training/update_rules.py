"""Muon and Adafactor for weights with declared axes, of the rules that optax has for plain matrices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from transformer_jax.errors import UserError
from transformer_jax.layers import is_parameter, is_stacked

_MUON_RMS = 0.2
"""Root mean square of Muon's updates, before the learning rate: about that of Adam's (Liu et al. 2025, 2.2)."""

_MUON_ADAM_BETA1 = 0.9


def muon_or_adam(beta1: float, beta2: float, epsilon: float, dtype: str | None) -> optax.GradientTransformation:
    """Orthogonalized updates of linear maps (Jordan 2024), and Adam for all other weights.

    Args:
        beta1: decay rate of the mean of gradients of linear maps.
        beta2: decay rate of the mean of squared gradients in Adam.
        epsilon: of Adam.
        dtype: that the means of gradients are kept in; None is that of the weights.
    """
    rules = {
        "muon": optax.chain(
            scale_by_muon(beta=beta1, mu_dtype=dtype, weight_dimension_numbers=_matrix_axes),
            optax.stateless(_scale_to_rms),
        ),
        "adam": optax.scale_by_adam(_MUON_ADAM_BETA1, beta2, epsilon, mu_dtype=dtype),
    }
    return optax.partition(rules, _muon_labels)


def _muon_labels(model: nnx.Module) -> nnx.Module:
    """The model with "muon" in place of each linear map, and "adam" elsewhere."""
    labels = map_weights(lambda leaf: leaf.replace("adam" if _matrix(leaf) is None else "muon"), model)
    if "muon" not in jax.tree.leaves(labels):
        raise UserError(
            "kind='muon' updates linear maps, of which none is trained; use another kind, or declare them with "
            "layers.parameter(..., num_inputs=...)"
        )
    return labels


def _matrix_axes(model: nnx.Module) -> nnx.Module:
    """The linear maps of a model with their axes in place of their weights."""
    return map_weights(lambda leaf: leaf.replace(_matrix(leaf)), model)


def _matrix(leaf: Any) -> MuonDimensionNumbers | None:
    """The axes of the inputs and of the outputs of a linear map, one of each layer; None of other weights."""
    num_inputs = getattr(leaf, "num_inputs", None)
    first = int(is_stacked(leaf))
    if not num_inputs or first + num_inputs >= leaf.ndim:
        return None
    axes = tuple(range(leaf.ndim))
    return MuonDimensionNumbers(axes[first : first + num_inputs], axes[first + num_inputs :])


def _matrix_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a linear map with one axis of inputs and one of outputs; that of another weight as it is."""
    matrix = _matrix(leaf)
    if matrix is None:
        return leaf.shape
    inputs, outputs = (math.prod(leaf.shape[axis] for axis in axes) for axes in matrix)
    return (*leaf.shape[: int(is_stacked(leaf))], inputs, outputs)


def _scale_to_rms(updates: Any, parameters: Any = None) -> Any:
    """Orthogonal matrices of n x m have a root mean square of 1 / sqrt(max(n, m)), and are given another."""

    def scale(leaf: Any) -> Any:
        return leaf.replace(leaf[...] * (_MUON_RMS * max(_matrix_shape(leaf)[-2:]) ** 0.5))

    return map_weights(scale, updates)


def scale_by_factored_rms(largest_decay: float) -> optax.GradientTransformation:
    """Gradients over the root of their mean square, kept as row and column means (Shazeer and Stern 2018, section 3).

    A linear map is one matrix per layer, whatever its heads. Of other weights optax factors the two largest axes: those
    of tables and of experts. What has no two axes of at least 128, as biases and norms, is kept as it is.
    """

    def decay(step: Any, exponent: Any) -> Any:
        return jnp.minimum(1 - (step + 1.0) ** -exponent, largest_decay)

    factored = optax.scale_by_factored_rms(decay_rate_fn=decay)

    def map_statistics(function: Callable[[Any, Any], Any], parameters: Any, state: Any) -> Any:
        trees = (map_weights(function, parameters, tree) for tree in (state.v_row, state.v_col, state.v))
        return type(state)(state.count, *trees)

    def init(parameters: Any) -> Any:
        return map_statistics(_with_axes, parameters, factored.init(map_weights(_as_matrix, parameters)))

    def update(updates: Any, state: Any, parameters: Any = None) -> Any:
        matrices = map_weights(_as_matrix, parameters)
        state = map_statistics(_without_axes, matrices, state)
        scaled, state = factored.update(map_weights(_as_matrix, updates), state, matrices)
        scaled = map_weights(lambda leaf, new: leaf.replace(new[...].reshape(leaf.shape)), updates, scaled)
        return scaled, map_statistics(_with_axes, parameters, state)

    return optax.GradientTransformation(init, update)


def _as_matrix(leaf: Any) -> Any:
    return leaf.replace(leaf[...].reshape(_matrix_shape(leaf)))


def _with_axes(parameter: Any, statistic: Any) -> Any:
    """A statistic of the size of its weight has its axes, and is sharded as it is; those of the others have no name."""
    if statistic.size == parameter.size:
        return parameter.replace(statistic[...].reshape(parameter.shape))
    return parameter.replace(statistic[...], axes=(None,) * statistic.ndim)


def _without_axes(matrix: Any, statistic: Any) -> Any:
    """A statistic as optax has it: with all that is known of its weight, which JAX compares in maps over both."""
    value = statistic[...]
    return matrix.replace(value.reshape(matrix.shape) if value.size == matrix.size else value)


def clip_rms(updates: Any, parameters: Any = None) -> Any:
    """Updates with a root mean square of at most 1 for each weight of each layer (Shazeer, Stern 2018, section 6)."""

    def clip(leaf: Any) -> Any:
        axes = tuple(range(int(is_stacked(leaf)), leaf.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(leaf[...]), axis=axes, keepdims=True))
        return leaf.replace(leaf[...] / jnp.maximum(1, rms))

    return map_weights(clip, updates)


def map_weights(function: Callable[..., Any], model: Any, *others: Any) -> Any:
    """A function of each weight, but for those that optax has masked since they are not for this transformation."""

    def call(leaf: Any, *rest: Any) -> Any:
        return leaf if isinstance(leaf.get_value(), optax.MaskedNode) else function(leaf, *rest)

    return jax.tree.map(call, model, *others, is_leaf=is_parameter)
