import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F
from transformer_jax.functional.dropout import split


def row_keys(rows, seed=0):
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.asarray(rows))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_drops_at_the_rate_and_keeps_the_mean(rate):
    ones = jnp.ones((64, 64, 256))
    for key in (jax.random.key(3), row_keys(range(64))):
        dropped = np.asarray(F.dropout(ones, rate, key))
        np.testing.assert_allclose(np.unique(dropped), [0, 1 / (1 - rate)], rtol=1e-6)
        deviation = (rate * (1 - rate) / dropped.size) ** 0.5
        assert (dropped == 0).mean() == pytest.approx(rate, abs=4 * deviation)
        assert dropped.mean(dtype=np.float64) == pytest.approx(1, abs=4 * deviation / (1 - rate))


def test_without_key_or_rate_it_is_the_identity():
    x = jnp.arange(6.0).reshape(2, 3)
    assert F.dropout(x, 0.5, None) is x
    assert F.dropout(x, 0.0, jax.random.key(0)) is x


def test_the_noise_of_a_row_depends_on_its_own_key_only():
    x = jnp.ones((8, 3, 32))
    whole = F.dropout(x, 0.4, row_keys(range(8)))
    part = F.dropout(x[4:6], 0.4, row_keys([4, 5]))
    np.testing.assert_array_equal(whole[4:6], part)


def test_noise_differs_between_rows_positions_keys_and_split_keys():
    x = jnp.ones((4, 16, 64))
    keys = row_keys(range(4))
    first, second = split(keys, 2)
    masks = [np.asarray(F.dropout(x, 0.5, key) == 0) for key in (keys, first, second, row_keys(range(4), seed=1))]
    for i, mask in enumerate(masks):
        rows = [mask[0], mask[1], mask[2], mask[3], *mask[:, 0], *mask[:, 1]]
        for a in range(len(rows)):
            for b in range(a):
                if rows[a].shape == rows[b].shape:
                    assert 0.3 < (rows[a] == rows[b]).mean() < 0.7
        for other in masks[:i]:
            assert 0.45 < (mask == other).mean() < 0.55


def test_the_gradient_is_dropped_where_the_value_is():
    x, keys = jnp.ones((2, 8)), row_keys(range(2))
    gradient = jax.grad(lambda x: F.dropout(x, 0.5, keys).sum())(x)
    np.testing.assert_array_equal(gradient, F.dropout(x, 0.5, keys))


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 0 and below 1; got 1"):
        F.dropout(jnp.ones((1, 2)), 1, jax.random.key(0))
