"""All that training changes, as one value."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state before update `step`. The key never changes: the noise of a step is folded in from its number."""

    step: Int[Array, ""]
    model: Any
    optimizer: optax.OptState
    key: Key[Array, ""]

    @classmethod
    def create(cls, model: Any, optimizer: optax.GradientTransformation, key: Array) -> "TrainState":
        """The state before the first update; `key` is where all noise comes from."""
        return cls(jnp.int32(0), model, optimizer.init(model), key)
