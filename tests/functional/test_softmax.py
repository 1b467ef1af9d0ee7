import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from transformer_jax import functional as F

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def test_the_example_of_the_notes():
    np.testing.assert_allclose(F.softmax(jnp.array([2.0, 1.0, 0.1])), [0.659, 0.242, 0.099], atol=5e-4)


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_agrees_with_the_definition_in_double_precision(function):
    x = np.random.default_rng(0).normal(size=(5, 7)) * 10
    expected = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    expected = np.log(expected) if function is F.log_softmax else expected
    np.testing.assert_allclose(function(jnp.array(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_do_not_overflow(dtype):
    large = jnp.array([1e4, 1e4, -1e4], dtype)
    np.testing.assert_array_equal(F.softmax(large), jnp.array([0.5, 0.5, 0.0], dtype))
    np.testing.assert_allclose(F.log_softmax(large)[:2].astype(jnp.float32), np.log([0.5, 0.5]), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3e4])
def test_a_row_with_nothing_in_it_is_zero_and_so_is_its_gradient(dtype, scale):
    x = (jnp.arange(6.0).reshape(2, 3) * scale / 5).astype(dtype)
    mask = jnp.array([[True, False, True], [False, False, False]])
    cotangent = jnp.ones((2, 3), dtype).at[:, 0].set(2)
    y, pullback = jax.vjp(jax.jit(lambda x: F.softmax(x, mask)), x)
    (gradient,) = pullback(cotangent)
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_array_equal(gradient[1], 0)
    assert y[0, 1] == 0 and gradient[0, 1] == 0
    assert y.dtype == dtype
    np.testing.assert_allclose(y[0].astype(jnp.float32).sum(), 1, rtol=1e-2)
    assert bool(jnp.isfinite(gradient).all())


def test_masked_log_softmax_is_the_logarithm_of_masked_softmax():
    x = jax.random.normal(jax.random.key(0), (4, 6))
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (4, 6)).at[0].set(False)
    np.testing.assert_allclose(jnp.exp(F.log_softmax(x, mask)), F.softmax(x, mask), atol=1e-6)

    def picked(x):
        return jnp.sum(jnp.where(mask, F.log_softmax(x, mask), 0) * jnp.cos(x))

    gradient = jax.grad(picked)(x)
    assert bool(jnp.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[0], 0)
    np.testing.assert_array_equal(jnp.where(mask, 0, gradient), 0)


def test_gradient_is_that_of_finite_differences():
    with jax.enable_x64(True):
        x = jnp.array(np.random.default_rng(0).normal(size=(3, 5)))
        mask = jnp.array(np.random.default_rng(1).random((3, 5)) < 0.7)
        for function in (F.softmax, lambda x, mask: jnp.where(mask, F.log_softmax(x, mask), 0)):
            check_grads(lambda x, f=function: jnp.sin(f(x, mask)), (x,), order=2, modes=["fwd", "rev"])


def test_a_mask_that_is_not_boolean_is_refused():
    with pytest.raises(TypeError, match=r"mask must be boolean.*int32"):
        F.softmax(jnp.ones(3), jnp.ones(3, jnp.int32))
