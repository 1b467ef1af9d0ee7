import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax import functional as F
from transformer_jax.errors import UserError
from transformer_jax.layers import KeyValue, LayerNorm, Linear, MultiHeadAttention, Residual, Stack


def test_linear_maps_named_axes_with_glorots_variance():
    layer = Linear({"embed": 256}, {"heads": 8, "head": 64}, rngs=nnx.Rngs(0))
    assert layer.weight.axes == ("embed", "heads", "head") and layer.weight.shape == (256, 8, 64)
    assert float(layer.weight[...].std()) == pytest.approx((2 / (256 + 512)) ** 0.5, rel=0.02)
    x = jax.random.normal(jax.random.key(0), (2, 3, 256))
    np.testing.assert_allclose(layer(x), np.einsum("BTD,DNH->BTNH", x, layer.weight[...]), atol=1e-4)
    back = Linear({"heads": 8, "head": 64}, {"embed": 256}, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(back(layer(x)), np.einsum("BTNH,NHD->BTD", layer(x), back.weight[...]), atol=1e-4)


def test_attention_to_projected_memory_is_attention_to_memory():
    attention = MultiHeadAttention(8, 2, 0.0, rngs=nnx.Rngs(0))
    x, memory = jax.random.normal(jax.random.key(0), (2, 1, 5, 8))
    out, weights = attention(x, memory, mask=F.causal())
    projected, _ = attention(x, attention.project(memory), mask=F.causal())
    np.testing.assert_array_equal(out, projected)
    np.testing.assert_array_equal(jnp.triu(weights, 1), 0)


def test_heads_of_unequal_size_are_refused():
    with pytest.raises(UserError, match="d_model=8 does not divide into num_heads=3 heads of equal size"):
        MultiHeadAttention(8, 3, 0.0, rngs=nnx.Rngs(0))


def test_a_cache_is_written_where_it_is_told():
    empty = KeyValue(jnp.zeros((1, 4, 1, 1)), jnp.zeros((1, 4, 1, 1)))
    new = KeyValue(jnp.ones((1, 2, 1, 1)), 2 * jnp.ones((1, 2, 1, 1)))
    written = empty.write(new, 1)
    np.testing.assert_array_equal(written.key.ravel(), [0, 1, 1, 0])
    np.testing.assert_array_equal(written.value.ravel(), [0, 2, 2, 0])
    with pytest.raises(UserError, match="the cache holds 4 positions; 2 more from position 3 do not fit"):
        empty.write(new, 3)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_residuals_normalize_where_they_say(placement):
    residual = Residual(LayerNorm(8, 1e-6, rngs=nnx.Rngs(0)), placement, 0.0)
    x = 5 + jax.random.normal(jax.random.key(0), (1, 3, 8))
    entered, left = residual.enter(x), residual.leave(x, x, None)
    normal = F.layer_norm(x, epsilon=1e-6)
    np.testing.assert_allclose(entered, normal if placement == "pre" else x, atol=1e-5)
    np.testing.assert_allclose(left, 2 * x if placement == "pre" else F.layer_norm(2 * x, epsilon=1e-6), atol=1e-5)


class Noise(nnx.Module):
    """A layer whose output is its dropout mask."""

    def __init__(self, rngs):
        self.norm = LayerNorm(2, 1e-6, rngs=rngs)

    def __call__(self, dropout_key):
        return F.dropout(jnp.ones((2, 1, 8, 64)), 0.5, dropout_key)


def test_layers_and_rows_drop_other_units():
    stack = Stack(Noise, 3, rematerialize=False, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(0), 2)
    _, noise = stack(lambda block, x, _, key: (x, block(key)), jnp.zeros((2, 1, 2)), dropout_key=keys)
    masks = np.asarray(noise).reshape(6, -1) == 0
    for a in range(6):
        for b in range(a):
            assert 0.4 < (masks[a] == masks[b]).mean() < 0.6
