import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding import sample
from transformer_jax.decoding.sampling import filtered

END, VOCAB = 0, 6


class Position:
    """A state that only counts."""

    def __init__(self, count=0, capacity=64):
        self.count, self.capacity = count, capacity


jax.tree_util.register_pytree_node(Position, lambda p: ((p.count,), p.capacity), lambda c, d: Position(d[0], c))

LOGITS = jnp.log(jnp.array([0.05, 0.4, 0.3, 0.15, 0.07, 0.03]))


def constant(tokens, state):
    """The same distribution whatever came before."""
    return jnp.broadcast_to(LOGITS, (*tokens.shape, VOCAB)), Position(state.count + tokens.shape[1], state.capacity)


def draw(rows, **settings):
    prompt = jnp.full((rows, 1), 2, jnp.int32)
    return sample(constant, Position(), prompt, jax.random.split(jax.random.key(0), rows), end_id=END, **settings)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.5}, [1, 2]),  # the token that crosses p is in
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 2]),
        ({"top_k": 3, "top_p": 0.99}, [1, 2, 3]),
        ({"temperature": 0.5, "top_k": 4}, [1, 2, 3, 4]),
        ({"temperature": 0}, [1]),
    ],
)
def test_tokens_come_as_often_as_numpy_says(settings, kept):
    rows = 20_000
    tokens = np.asarray(draw(rows, length=1, **settings).tokens[:, 0])
    found = np.bincount(tokens, minlength=VOCAB) / rows
    weights = np.zeros(VOCAB)
    weights[kept] = np.exp(np.asarray(LOGITS, float)[kept] / (settings.get("temperature", 1) or 1))
    expected = weights / weights.sum()
    assert set(np.flatnonzero(found)) == set(kept)
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / rows))


@pytest.mark.parametrize("top_k", [None, 1, 3, 9, 50])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_the_kept_tokens_are_those_of_a_sorted_list(top_k, top_p):
    logits = np.round(np.random.default_rng(0).normal(size=(50, 9)), 1).astype(np.float32)  # among which are equal ones
    kept = np.isfinite(filtered(jnp.asarray(logits), temperature=0.7, top_k=top_k, top_p=top_p))
    for row, row_kept in zip(logits / np.float32(0.7), kept, strict=True):
        order = np.argsort(-row, kind="stable")[: top_k or 9]
        weights = np.exp(row[order].astype(float))
        before = np.cumsum(weights) - weights
        assert set(np.flatnonzero(row_kept)) == set(order[before / weights.sum() < top_p])


@pytest.mark.parametrize(("settings", "sorts"), [({}, 0), ({"top_k": 6}, 0), ({"top_k": 2}, 1), ({"top_p": 0.5}, 1)])
def test_the_vocabulary_is_sorted_once_at_most(settings, sorts):
    settings = {"temperature": 0.9, "top_k": None, "top_p": 1.0} | settings
    program = str(jax.make_jaxpr(lambda logits: filtered(logits, **settings))(jnp.zeros((2, 6))))
    assert program.count("sort[") + program.count("top_k[") == sorts


def test_without_a_nucleus_top_k_keeps_k_however_unlikely():
    kept = filtered(jnp.array([[20.0, 0, 0, 0, -1]]), temperature=1.0, top_k=3, top_p=1.0)
    assert int(jnp.isfinite(kept).sum()) == 3


def test_of_equal_tokens_top_k_keeps_k():
    kept = filtered(jnp.zeros((1, 5)), temperature=1.0, top_k=2, top_p=1.0)
    assert int(jnp.isfinite(kept).sum()) == 2


def test_a_row_ends_at_its_end_token_or_its_limit():
    limits = jnp.array([3, 40] * 50)
    found = draw(100, length=40, limits=limits)
    for row, length, limit in zip(found.tokens, found.lengths, limits, strict=True):
        assert length <= limit and (row[:length] != END).all() and (row[length:] == END).all()
    assert (found.lengths[::2] == 3).sum() > 20 and (found.lengths[1::2] < 40).sum() > 20


def test_what_a_row_draws_does_not_depend_on_the_others():
    keys = jax.random.split(jax.random.key(0), 8)
    together = sample(constant, Position(), jnp.full((8, 1), 2), keys, length=9, end_id=END)
    alone = sample(constant, Position(), jnp.full((1, 1), 2), keys[5:6], length=9, end_id=END)
    np.testing.assert_array_equal(together.tokens[5], alone.tokens[0])
    assert len({tuple(row) for row in np.asarray(together.tokens).tolist()}) > 5


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}])
def test_impossible_settings_are_named(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}={settings[name]}"):
        draw(1, length=1, **settings)
