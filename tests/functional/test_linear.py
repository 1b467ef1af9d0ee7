import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F
from transformer_jax.functional.linear import wide_einsum


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_an_id_outside_the_table_is_nan_under_jit_and_never_a_row(dtype):
    table = jnp.arange(12.0).reshape(4, 3)
    ids = jnp.array([[-1, -4, -100], [0, 3, 4]], dtype)
    rows = jax.jit(F.embed)(table, ids)
    assert np.isnan(rows[0]).all() and np.isnan(rows[1, 2]).all()
    np.testing.assert_array_equal(rows[1, :2], table[jnp.array([0, 3])])


def test_integers_are_multiplied_too():
    np.testing.assert_array_equal(F.linear(jnp.arange(3)[None], jnp.eye(3)), [[0, 1, 2]])


def test_an_id_outside_the_table_has_no_gradient():
    gradient = jax.grad(lambda table: jnp.nansum(F.embed(table, jnp.array([-1, 1, 7]))))(jnp.ones((4, 3)))
    np.testing.assert_array_equal(gradient, np.eye(4)[1][:, None] * np.ones(3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_wide_product_is_rounded_to_float32_alone_and_its_gradient_to_its_own_dtype(dtype):
    random = np.random.default_rng(0)
    x, y, cotangent = (
        jnp.asarray(random.normal(size=shape), kind)
        for shape, kind in (((5, 64), dtype), ((7, 64), dtype), ((5, 7), jnp.float32))
    )

    def product(x, y):
        return wide_einsum("TD,SD->TS", x, y)

    z, backward = jax.vjp(product, x, y)
    exact_x, exact_y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert z.dtype == jnp.float32
    np.testing.assert_allclose(z, exact_x @ exact_y.T, atol=1e-4)
    dx, dy = backward(cotangent)
    assert dx.dtype == dy.dtype == dtype
    atol = 0.2 if dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(np.float32(dx), cotangent @ exact_y, atol=atol)
    np.testing.assert_allclose(np.float32(dy), cotangent.T @ exact_x, atol=atol)
    _, forward = jax.jvp(product, (x, y), (x, y))
    np.testing.assert_allclose(forward, 2 * exact_x @ exact_y.T, rtol=0.02, atol=atol)
    products = [
        equation for equation in jax.make_jaxpr(backward)(cotangent).eqns if equation.primitive.name == "dot_general"
    ]
    assert [{var.aval.dtype for var in equation.invars} for equation in products] == [{jnp.dtype(dtype)}] * 2
