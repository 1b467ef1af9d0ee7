import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F


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
