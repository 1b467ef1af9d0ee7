import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from transformer_jax import functional as F


def random(*shapes, seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def naive(scores, value, mask=None):
    """Attention by a loop over every query, in double precision. scores [B,N,T,S], value [B,S,K,V]."""
    scores, value = np.asarray(scores, np.float64), np.asarray(value, np.float64)
    B, N, T, S = scores.shape
    mask = np.ones((B, N, T, S), bool) if mask is None else np.broadcast_to(mask, (B, N, T, S))
    out, weights = np.zeros((B, T, N, value.shape[-1])), np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        seen = [s for s in range(S) if mask[b, n, t, s]]
        if seen:
            powers = np.exp(scores[b, n, t, seen] - scores[b, n, t, seen].max())
            weights[b, n, t, seen] = powers / powers.sum()
            out[b, t, n] = weights[b, n, t] @ value[b, :, n * value.shape[2] // N]
    return out, weights


def dot_scores(query, key):
    group = query.shape[2] // key.shape[2]
    return np.einsum("BTNH,BSNH->BNTS", np.asarray(query, np.float64), np.repeat(key, group, axis=2))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_scaled_dot_product_with_grouped_heads(key_heads, masked):
    query, key, value, bias = random((2, 3, 4, 8), (2, 5, key_heads, 8), (2, 5, key_heads, 6), (1, 4, 3, 5))
    mask = jax.random.bernoulli(jax.random.key(9), 0.5, (2, 1, 3, 5)) if masked else None
    out, weights = F.dot_product_attention(query, key, value, mask=mask, bias=bias, return_weights=True)
    expected, expected_weights = naive(dot_scores(query, key) / np.sqrt(8) + bias, value, mask)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)
    alone = F.dot_product_attention(query, key, value, mask=mask, bias=bias)
    np.testing.assert_array_equal(alone, out)


def test_multiplicative_has_no_scale():
    query, key, value = random((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    out = F.multiplicative_attention(query, key, value, mask=F.causal())
    mask = np.asarray(F.causal().array(3, 5))
    np.testing.assert_allclose(out, naive(dot_scores(query, key), value, mask)[0], atol=1e-5)


def test_additive_is_bahdanaus():
    query, key, value, W, U, v = random((2, 3, 1, 4), (2, 5, 1, 6), (2, 5, 1, 7), (4, 8), (6, 8), (8,))
    out, weights = F.additive_attention(query, key, value, W, U, v, return_weights=True)
    scores = np.zeros((2, 1, 3, 5))
    for b, t, s in np.ndindex(2, 3, 5):
        scores[b, 0, t, s] = v @ jnp.tanh(W.T @ query[b, t, 0] + U.T @ key[b, s, 0])
    expected, expected_weights = naive(scores, value)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_query_that_may_see_nothing_gives_exact_zeros(dtype):
    arrays = random((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4), dtype=dtype)
    mask = F.arbitrary(jnp.ones((1, 1, 3, 5), bool).at[0, 0, 1].set(False))

    def attention(query, key, value):
        return F.dot_product_attention(query * 1e3, key, value, mask=mask)

    out, pullback = jax.vjp(jax.jit(attention), *arrays)
    gradients = pullback(jnp.zeros_like(out).at[:, 1].set(1))
    np.testing.assert_array_equal(out[:, 1], 0)
    assert all(bool((gradient == 0).all()) for gradient in gradients)
    everywhere = pullback(jnp.ones_like(out))
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in everywhere)


@pytest.mark.parametrize("extra", [0, 1, 7, 64])
def test_padding_changes_nothing(extra):
    query, key, value = random((2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4))
    valid = jnp.array([[True] * 5, [True, True, True, False, False]])
    out = F.dot_product_attention(query, key, value, mask=F.padding(valid))
    longer = ((0, 0), (0, extra), (0, 0), (0, 0))
    padded = [jnp.pad(x, longer, constant_values=3.0) for x in (query, key, value)]
    padded_out = F.dot_product_attention(*padded, mask=F.padding(jnp.pad(valid, ((0, 0), (0, extra)))))
    np.testing.assert_allclose(padded_out[:, :5], out, atol=1e-6)


def test_the_newest_queries_against_all_keys_equal_the_full_pass():
    query, key, value = random((2, 6, 2, 4), (2, 6, 2, 4), (2, 6, 2, 4))
    full = F.dot_product_attention(query, key, value, mask=F.causal())
    for count in (1, 2, 5):
        part = F.dot_product_attention(query[:, -count:], key, value, mask=F.causal())
        np.testing.assert_allclose(part, full[:, -count:], atol=1e-6)
    with_room = F.dot_product_attention(query[:, 2:3], key, value, mask=F.causal(offset=2))
    np.testing.assert_allclose(with_room, full[:, 2:3], atol=1e-6)


def test_packed_documents_do_not_influence_each_other():
    query, key, value = random((1, 6, 2, 4), (1, 6, 2, 4), (1, 6, 2, 4))
    ids = jnp.array([[1, 1, 2, 2, 2, 2]])
    mask = F.causal() & F.segments(ids)
    packed = F.dot_product_attention(query, key, value, mask=mask)
    alone = F.dot_product_attention(query[:, 2:], key[:, 2:], value[:, 2:], mask=F.causal())
    np.testing.assert_allclose(packed[:, 2:], alone, atol=1e-6)
    for argument in (0, 1, 2):
        jacobian = jax.jacobian(lambda *arrays: F.dot_product_attention(*arrays, mask=mask), argnums=argument)(
            query, key, value
        )
        np.testing.assert_array_equal(jacobian[0, 2:, :, :, 0, :2], 0)
        np.testing.assert_array_equal(jacobian[0, :2, :, :, 0, 2:], 0)


def test_gradients_are_those_of_finite_differences():
    with jax.enable_x64(True):
        arrays = random((1, 2, 2, 3), (1, 3, 1, 3), (1, 3, 1, 3), (1, 2, 2, 3), dtype=jnp.float64)
        check_grads(lambda q, k, v, bias: F.dot_product_attention(q, k, v, bias=bias, mask=F.causal()), arrays, order=1)


def test_bfloat16_is_float32_rounded():
    arrays = random((2, 16, 2, 32), (2, 16, 2, 32), (2, 16, 2, 32), dtype=jnp.bfloat16)
    narrow = F.dot_product_attention(*arrays)
    wide = F.dot_product_attention(*(x.astype(jnp.float32) for x in arrays))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=7e-3)


def test_scores_are_scaled_in_float32():
    """A scale that is no power of two would round a bfloat16 query: the weights, kept in float32, would show it."""
    query, key = (jax.random.normal(jax.random.key(n), (1, 5, 1, 3), jnp.bfloat16) for n in (0, 1))
    _, weights = F.dot_product_attention(4 * query, key, jnp.ones((1, 5, 1, 2)), return_weights=True)
    scores = np.einsum("BTNH,BSNH->BNTS", *(np.asarray(x, np.float64) for x in (4 * query, key))) / np.sqrt(3)
    powers = np.exp(scores)
    np.testing.assert_allclose(weights, powers / powers.sum(-1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize("return_weights", [False, True])
def test_weights_are_not_kept_for_the_backward_pass(return_weights):
    query, key, value = random((2, 9, 2, 4), (2, 9, 2, 4), (2, 9, 2, 4))
    bias, dropout_key = jnp.ones((1, 1, 9, 9)), jax.random.key(0)

    def attend(query, key, value):
        settings = {"mask": F.causal(), "bias": bias, "dropout_rate": 0.1, "dropout_key": dropout_key}
        return F.dot_product_attention(query, key, value, **settings, return_weights=return_weights)

    _, backward = jax.vjp(attend, query, key, value)
    kept = [array.shape for array in jax.tree.leaves(backward)]
    assert query.shape in kept and all(np.prod(shape) < 2 * 2 * 9 * 9 for shape in kept)


def test_dropped_weights_are_made_up_for_by_the_others():
    query, key = random((1, 64, 1, 4), (1, 64, 1, 4))
    value = jnp.eye(64)[None, :, None, :]
    kept = F.dot_product_attention(query, key, value, dropout_rate=0.25, dropout_key=jax.random.key(0))[:, :, 0]
    whole = F.dot_product_attention(query, key, value)[:, :, 0]
    dropped = np.asarray(kept == 0)
    assert abs(dropped.mean() - 0.25) < 0.02
    np.testing.assert_allclose(kept[~dropped], whole[~dropped] / 0.75, rtol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4)), "query has batch 1, key 2 and value 2"),
        (((1, 2, 3, 4), (1, 3, 2, 4), (1, 3, 2, 4)), "query has 3 heads, which is not a multiple of the key's 2"),
        (((1, 2, 2, 4), (1, 3, 2, 5), (1, 3, 2, 5)), "query has head size 4 but key has 5"),
        (((1, 2, 2, 4), (1, 3, 2, 4), (1, 4, 2, 4)), r"key has \(length, heads\) \(3, 2\) but value has \(4, 2\)"),
        (((2, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4)), "query needs the axes"),
    ],
)
def test_mistakes_are_named(shapes, message):
    with pytest.raises(ValueError, match=message):
        F.dot_product_attention(*random(*shapes))


def test_an_unknown_implementation_is_refused():
    arrays = random((1, 2, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4))
    with pytest.raises(ValueError, match="implementation='flash' is unknown; choose 'reference'"):
        F.dot_product_attention(*arrays, implementation="flash")
