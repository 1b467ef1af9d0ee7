import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.functional.relative import (
    relative_distances,
    relative_position_scores,
    relative_shift,
    segment_scores,
)

LENGTHS = [(1, 1), (1, 4), (3, 3), (3, 5)]

shift = jax.jit(relative_shift, static_argnums=1)
position_scores = jax.jit(relative_position_scores, static_argnums=2)


def random(*shapes, dtype=jnp.float32):
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(dtype) for shape in shapes]


def distance(query, key, num_queries, num_keys):
    """How far a key stands before a query, where the queries are the last of the keys."""
    return (num_keys - num_queries + query) - key


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_every_pair_has_its_distance(num_queries, num_keys):
    distances = relative_distances(num_queries, num_keys).tolist()
    assert len(distances) == num_queries + num_keys
    shifted = shift(np.array(distances * num_queries).reshape(1, 1, num_queries, -1), num_keys)
    shifted = np.asarray(shifted)
    for i, j in np.ndindex(num_queries, num_keys):
        assert shifted[0, 0, i, j] == distance(i, j, num_queries, num_keys)


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_position_scores_are_those_of_the_distance_of_each_pair(num_queries, num_keys):
    query, by_distance = random((2, num_queries, 3, 4), (2, num_queries + num_keys, 3, 4))
    scores = np.asarray(position_scores(query, by_distance, num_keys))
    assert scores.shape == (2, 3, num_queries, num_keys)
    order = relative_distances(num_queries, num_keys).tolist()
    for b, n, i, j in np.ndindex(scores.shape):
        key = by_distance[b, order.index(distance(i, j, num_queries, num_keys)), n]
        np.testing.assert_allclose(scores[b, n, i, j], query[b, i, n] @ key, rtol=1e-4, atol=1e-5)


def test_all_rows_may_share_the_keys_of_the_distances():
    query, by_distance = random((2, 3, 3, 4), (1, 8, 3, 4))
    shared = position_scores(query, by_distance, 5)
    own = position_scores(query, np.repeat(by_distance, 2, axis=0), 5)
    np.testing.assert_allclose(shared, own, atol=1e-5)


def test_queries_anywhere_have_the_scores_of_their_places():
    places = np.array([[3, 0, 2, 2, 1], [0, 1, 3, 3, 3]])
    everywhere, by_distance = random((2, 4, 3, 4), (2, 4 + 6, 3, 4))
    query = np.take_along_axis(everywhere, places[..., None, None], axis=1)
    expected = np.asarray(position_scores(everywhere, by_distance, 6))
    scores = position_scores(query, by_distance, 6, places)
    for b, p in np.ndindex(2, 5):
        np.testing.assert_allclose(scores[b, :, p], expected[b, :, places[b, p]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("places", [None, np.array([[2, 0, 2], [1, 2, 0]])])
def test_the_gradient_goes_back_to_the_distances_it_came_from(places):
    scores, weights = random((2, 1, 3, 8), (2, 1, 3, 5))
    gradient = jax.jit(jax.grad(lambda scores: jnp.sum(shift(scores, 5, places) * weights)))(scores)
    expected = np.zeros(scores.shape)
    order = relative_distances(3, 5).tolist()
    for b, i, j in np.ndindex(2, 3, 5):
        place = i if places is None else places[b, i]
        expected[b, 0, i, order.index(distance(place, j, 3, 5))] += weights[b, 0, i, j]
    np.testing.assert_allclose(gradient, expected)


def test_segment_scores_choose_one_of_two_keys():
    query, segment_key = random((2, 3, 4, 5), (2, 4, 5))
    same = np.random.default_rng(1).random((2, 1, 3, 6)) < 0.5
    scores = np.asarray(jax.jit(segment_scores)(query, segment_key, same))
    assert scores.shape == (2, 4, 3, 6)
    for b, n, i, j in np.ndindex(scores.shape):
        expected = query[b, i, n] @ segment_key[0 if same[b, 0, i, j] else 1, n]
        np.testing.assert_allclose(scores[b, n, i, j], expected, rtol=1e-4, atol=1e-5)


def test_scores_of_bfloat16_are_summed_in_float32():
    query, by_distance, segment_key = random((1, 1, 1, 512), (1, 2, 1, 512), (2, 1, 512), dtype=jnp.bfloat16)
    for scores, key in (
        (position_scores(query, by_distance, 1), by_distance[0, 1, 0]),
        (jax.jit(segment_scores)(query, segment_key, np.ones((1, 1, 1, 1), bool)), segment_key[0, 0]),
    ):
        assert scores.dtype == jnp.float32
        expected = query[0, 0, 0].astype(np.float64) @ key.astype(np.float64)
        np.testing.assert_allclose(scores, np.full((1, 1, 1, 1), expected), rtol=1e-4)


def test_distances_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="3 queries and 5 keys have other than 9 distances"):
        relative_shift(jnp.zeros((1, 1, 3, 9)), 5)
