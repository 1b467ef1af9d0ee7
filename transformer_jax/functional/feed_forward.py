"""The position-wise feed-forward network."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
from jaxtyping import Array, Float, Key

from transformer_jax.functional.dropout import dropout
from transformer_jax.functional.linear import linear

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


def activation_function(name: Activation) -> Callable[[Array], Array]:
    """The function of that name: `gelu` is the exact one with erf (BERT), `gelu_tanh` its approximation (GPT-2)."""
    functions = {
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "silu": jax.nn.silu,
    }
    if name not in functions:
        raise ValueError(f"activation={name!r} is unknown; choose one of {', '.join(functions)}")
    return functions[name]


def feed_forward(
    x: Float[Array, "B T D"],
    weight_in: Float[Array, "D F"],
    weight_out: Float[Array, "F D"],
    bias_in: Float[Array, "F"] | None = None,
    bias_out: Float[Array, "D"] | None = None,
    *,
    gate: Float[Array, "D F"] | None = None,
    bias_gate: Float[Array, "F"] | None = None,
    activation: Activation = "relu",
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, "..."] | None = None,
) -> Float[Array, "B T D"]:
    """FFN(x) = f(x W1 + b1) W2 + b2, with f = ReLU in the paper (Vaswani et al. 2017, equation 2).

    With a `gate` G it is (f(x G + c) * (x W1 + b1)) W2 + b2 (Shazeer 2020): SwiGLU for f = silu, GEGLU for f = gelu.
    """
    f = activation_function(activation)

    # The backward pass computes the activation again: that is cheaper than to keep it beside its argument.
    @partial(jax.checkpoint, prevent_cse=False)
    def activate_and_project(hidden, gated, weight_out, bias_out):
        active = f(hidden) if gated is None else f(gated) * hidden
        return linear(dropout(active, dropout_rate, dropout_key), weight_out, bias_out)

    gated = None if gate is None else linear(x, gate, bias_gate)
    return activate_and_project(linear(x, weight_in, bias_in), gated, weight_out, bias_out)
