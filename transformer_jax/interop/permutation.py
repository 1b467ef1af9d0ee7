"""A Transformer with its features in another order: the same function."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.layers import is_parameter
from transformer_jax.models import Transformer


def with_halved_sinusoids(model: Transformer) -> Transformer:
    """The model whose sinusoids have all sines before all cosines, and which gives the same logits.

    The paper has each sine beside its cosine. To a Transformer it does not matter which feature is which: a norm treats
    all alike, and a linear map may have them in any order, as long as that is the same for every weight.
    """
    if model.config.sinusoids == "halved":
        return model
    features = np.arange(model.config.d_model)
    order = np.concatenate([features[0::2], features[1::2]])

    def ordered(parameter: nnx.Param) -> Any:
        weight = parameter[...]
        for axis, name in enumerate(parameter.axes):
            weight = jnp.take(weight, order, axis) if name == "embed" else weight
        return parameter.replace(weight)

    permuted = jax.tree.map(ordered, model, is_leaf=is_parameter)
    permuted.config = replace(model.config, sinusoids="halved")
    return permuted
