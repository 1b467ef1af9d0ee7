import math

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F
from transformer_jax.functional.feed_forward import activation_function

POINTS = np.array([-3.0, -1.0, 0.0, 0.5, 2.0], np.float32)


def erf_gelu(x):
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "expected"), [("relu", lambda x: max(x, 0)), ("gelu", erf_gelu), ("gelu_tanh", tanh_gelu), ("silu", silu)]
)
def test_activations_at_five_points(name, expected):
    np.testing.assert_allclose(activation_function(name)(POINTS), [expected(x) for x in POINTS], atol=2e-7)


def test_the_two_gelus_differ():
    assert abs(erf_gelu(-3.0) - tanh_gelu(-3.0)) > 1e-4


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation='swish' is unknown; choose one of relu, gelu, gelu_tanh, silu"):
        activation_function("swish")


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_is_the_equation(gated):
    random = np.random.default_rng(0)
    x, W1, b1, W2, b2, G = (
        random.normal(size=shape).astype(np.float32) for shape in [(2, 3, 4), (4, 8), (8,), (8, 4), (4,), (4, 8)]
    )
    hidden = x @ W1 + b1
    gate = x @ G
    hidden = gate / (1 + np.exp(-gate)) * hidden if gated else np.maximum(hidden, 0)
    out = F.feed_forward(
        jnp.array(x), W1, W2, b1, b2, gate=G if gated else None, activation="silu" if gated else "relu"
    )
    np.testing.assert_allclose(out, hidden @ W2 + b2, rtol=1e-4, atol=1e-5)
