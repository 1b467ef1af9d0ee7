import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F


def reference(x, epsilon, centre):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True) if centre else x
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)


def test_agree_with_the_definition(x):
    scale, bias = np.linspace(0.5, 2, 64, dtype=np.float32), np.linspace(-1, 1, 64, dtype=np.float32)
    np.testing.assert_allclose(
        F.layer_norm(x, scale, bias, epsilon=1e-6), reference(x, 1e-6, True) * scale + bias, atol=1e-5
    )
    np.testing.assert_allclose(F.rms_norm(x, scale, epsilon=1e-6), reference(x, 1e-6, False) * scale, atol=1e-5)


def test_a_large_mean_does_not_drown_the_variance(x):
    exact = reference((x + np.float32(1e4)).astype(np.float64), 1e-6, True)
    np.testing.assert_allclose(F.layer_norm(x + np.float32(1e4), epsilon=1e-6), exact, atol=2e-3)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 1e-5])
def test_epsilon_matters_when_the_variance_is_small(x, epsilon):
    tiny = x * np.float32(1e-3)
    np.testing.assert_allclose(
        F.layer_norm(tiny, epsilon=epsilon), reference(tiny, epsilon, True), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(F.rms_norm(tiny, epsilon=epsilon), reference(tiny, epsilon, False), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_bfloat16_is_computed_in_float32(norm, x):
    narrow = jnp.asarray(x + 100, jnp.bfloat16)
    result = norm(narrow, epsilon=1e-6)
    assert result.dtype == jnp.bfloat16
    expected = norm(narrow.astype(jnp.float32), epsilon=1e-6)
    np.testing.assert_array_equal(result, expected.astype(jnp.bfloat16))
