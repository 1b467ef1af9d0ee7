"""Checks that all architectures share: of configs, which raise UserError, and of what a model is called with."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from transformer_jax.errors import UserError
from transformer_jax.layers.stack import Rematerialize


def check_sizes(config: Any, *names: str) -> None:
    """Raise unless these, and `unroll`, are all at least 1, or None; and on an unknown `rematerialize`."""
    if config.rematerialize not in get_args(Rematerialize):
        raise UserError(
            f"rematerialize={config.rematerialize!r} is unknown; choose {', '.join(get_args(Rematerialize))}"
        )
    for name in (*names, "unroll"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1; got {getattr(config, name)}")


def check_rates(config: Any, *names: str) -> None:
    """Raise unless these are all dropout rates, or None."""
    for name in names:
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 0 and below 1; got {getattr(config, name)}")


def check_labels(config: Any) -> None:
    """Raise unless there are as many labels as heads with labels and the names of labels say."""
    for head in {"classifier", "tagger"} & set(config.heads):
        if config.num_labels is None:
            raise UserError(f"the head {head!r} needs num_labels")
    if config.label_names and len(config.label_names) != config.num_labels:
        raise UserError(f"num_labels={config.num_labels}, but there are {len(config.label_names)} label_names")


def check_output_layer(config: Any) -> None:
    """Raise unless the model of a config has an output layer."""
    if not config.lm_head:
        raise ValueError(
            "the model has no output layer (lm_head=False): it gives hidden states, and no logits; "
            "load or train one with lm_head=True"
        )


def check_head(config: Any, head: str) -> None:
    """Raise unless the model of a config has this head."""
    if head not in config.heads:
        there = ", ".join(config.heads) or "none"
        raise ValueError(f"the model has no head {head!r} (its heads: {there}); make or load one with it in heads")


def check_tokens(**arrays: Array | None) -> None:
    """Raise unless each of these, by its name in the call, is None or integers with the axes [batch, length]."""
    for name, array in arrays.items():
        if array is None:
            continue
        if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.integer):
            given = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{name} must be an array of integers; got {given}")
        if array.ndim != 2:
            hint = f"; give {name}[None] for one row" if array.ndim == 1 else ""
            raise ValueError(f"{name} needs the axes [batch, length]; got shape {array.shape}{hint}")


def check_room(length: int, max_length: int, row_starts: Int[Array, "B"] | None = None) -> None:
    """Raise if decoding `length` tokens needs more positions than are learned.

    Row starts are not known under a trace: there a position that is not learned gives NaN.
    """
    if isinstance(row_starts, jax.core.Tracer):
        return
    longest = length - (0 if row_starts is None else int(np.min(row_starts)))
    if longest > max_length:
        raise ValueError(f"there are learned positions for max_length={max_length} tokens; {longest} are asked for")


def check_heads(d_model: int, num_heads: int) -> None:
    """Raise unless the heads share the model's features evenly."""
    if d_model % num_heads:
        fitting = [n for n in range(1, num_heads + 1) if d_model % n == 0]
        raise UserError(
            f"num_heads={num_heads} does not divide d_model={d_model}; set num_heads to a divisor such as {fitting[-1]}"
        )
