import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F


def positions(num_queries, num_keys, offset):
    return np.arange(num_queries)[:, None] + offset, np.arange(num_keys)[None, :]


def allowed(mask, num_queries, num_keys):
    return np.asarray(mask.array(num_queries, num_keys)[0, 0])


@pytest.mark.parametrize(("num_queries", "num_keys"), [(4, 4), (1, 5), (3, 7), (5, 2)])
def test_bands(num_queries, num_keys):
    query, key = positions(num_queries, num_keys, num_keys - num_queries)
    np.testing.assert_array_equal(allowed(F.causal(), num_queries, num_keys), key <= query)
    np.testing.assert_array_equal(
        allowed(F.window(2, 1), num_queries, num_keys), (key >= query - 2) & (key <= query + 1)
    )
    first, _ = positions(num_queries, num_keys, 0)
    np.testing.assert_array_equal(allowed(F.anti_causal(), num_queries, num_keys), key >= first)


def test_backward_in_time_is_forward_in_time_reversed():
    for num_queries, num_keys in [(4, 4), (2, 5)]:
        backward = allowed(F.anti_causal(), num_queries, num_keys)
        np.testing.assert_array_equal(backward, allowed(F.causal(), num_queries, num_keys)[::-1, ::-1])


def test_offsets_may_be_traced_and_differ_by_row():
    array = jax.jit(lambda offset: F.causal(offset).array(1, 4))(jnp.array([0, 2]))
    np.testing.assert_array_equal(array[:, 0, 0], [[1, 0, 0, 0], [1, 1, 1, 0]])


def test_padding_and_segments_are_asymmetric():
    valid = jnp.array([[True, True, False]])
    np.testing.assert_array_equal(F.padding(valid).array(2, 3)[0, 0], [[1, 1, 0]])
    mask = F.segments(jnp.array([[1, 2]]), jnp.array([[1, 1, 2]]))
    np.testing.assert_array_equal(mask.array(2, 3)[0, 0], [[1, 1, 0], [0, 0, 1]])


def test_masks_combine_with_each_other_and_with_arrays():
    array = jnp.array([True, False, True, True])[None, None, None, :]
    combined = F.causal() & F.window(1, 0) & array
    expected = np.tril(np.ones((4, 4), bool)) & np.triu(np.ones((4, 4), bool), -1) & [True, False, True, True]
    np.testing.assert_array_equal(allowed(combined, 4, 4), expected)
    np.testing.assert_array_equal(
        allowed(array & F.causal(), 4, 4), np.tril(np.ones((4, 4), bool)) & np.asarray(array[0, 0])
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: F.padding(jnp.ones((1, 2), jnp.int32)), TypeError, "padding must be boolean"),
        (lambda: F.arbitrary(jnp.ones((2, 2), bool)), ValueError, r"\[batch, heads, queries, keys\].*\(2, 2\)"),
        (lambda: F.padding(jnp.ones((1, 2), bool)).array(2, 3), ValueError, "covers 2 keys but there are 3"),
        (lambda: F.segments(jnp.ones((1, 2), jnp.int32)).array(1, 2), ValueError, "cover 2 queries and 2 keys but"),
        (lambda: F.window(-1, 0), ValueError, "before must not be negative; got -1"),
    ],
)
def test_mistakes_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
