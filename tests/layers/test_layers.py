import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax import functional as F
from transformer_jax.layers import (
    AuxiliaryOutputs,
    Block,
    Embedding,
    FeedForward,
    KeyValue,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Residual,
    RMSNorm,
    Rotary,
    Stack,
    fan_in_normal,
    glorot_uniform,
    same_normal,
    scaled,
)


def vectors(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_maps_named_axes_with_glorots_variance():
    layer = Linear({"embed": 256}, {"heads": 8, "head": 64}, rngs=nnx.Rngs(0))
    assert layer.weight.axes == ("embed", "heads", "head") and layer.weight.shape == (256, 8, 64)
    assert float(layer.weight[...].std()) == pytest.approx((2 / (256 + 512)) ** 0.5, rel=0.02)
    x = jax.random.normal(jax.random.key(0), (2, 3, 256))
    np.testing.assert_allclose(layer(x), np.einsum("BTD,DNH->BTNH", x, layer.weight[...]), atol=1e-4)
    back = Linear({"heads": 8, "head": 64}, {"embed": 256}, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(back(layer(x)), np.einsum("BTNH,NHD->BTD", layer(x), back.weight[...]), atol=1e-4)


def test_linear_without_a_bias_knows_which_axes_are_inputs():
    layer = Linear({"embed": 4}, {"heads": 2, "head": 3}, bias=False, rngs=nnx.Rngs(0))
    back = Linear({"heads": 2, "head": 3}, {"embed": 4}, bias=False, rngs=nnx.Rngs(1))
    assert layer.bias is None and (layer.weight.num_inputs, back.weight.num_inputs) == (1, 2)
    x = vectors(2, 5, 4)
    heads = layer(x)
    np.testing.assert_allclose(heads, np.einsum("BTD,DNH->BTNH", x, layer.weight[...]), atol=1e-6)
    np.testing.assert_allclose(back(heads), np.einsum("BTNH,NHD->BTD", heads, back.weight[...]), atol=1e-6)


@pytest.mark.parametrize(
    ("initializer", "expected", "uniform"),
    [
        (glorot_uniform, (2 / (60 + 200)) ** 0.5, True),
        (fan_in_normal, 60**-0.5, False),
        (same_normal(0.02), 0.02, False),
        (scaled(fan_in_normal, 0.3), 0.3 * 60**-0.5, False),
        (scaled(glorot_uniform, 5.0), 5 * (2 / (60 + 200)) ** 0.5, True),
    ],
)
def test_initializers_have_the_standard_deviations_that_they_name(initializer, expected, uniform):
    inputs, outputs = {"heads": 6, "head": 10}, {"embed": 200}
    weight = np.asarray(Linear(inputs, outputs, initializer=initializer, rngs=nnx.Rngs(0)).weight[...])
    assert weight.std() == pytest.approx(expected, rel=0.02) and abs(weight.mean()) < 0.03 * expected
    assert (np.abs(weight).max() < 1.75 * expected) == uniform  # sqrt(3) deviations are all there is of a uniform one


def test_embeddings_of_other_things_than_words_say_so():
    table = Embedding(50, 64, axis="position", decay=False, rngs=nnx.Rngs(0)).table
    assert table.axes == ("position", "embed") and not table.decay
    words = Embedding(50, 64, rngs=nnx.Rngs(0))
    assert words.table.axes == ("vocab", "embed") and words.table.decay
    assert float(words.table[...].std()) == pytest.approx(64**-0.5, rel=0.03)
    x = jnp.asarray(vectors(1, 2, 64), jnp.bfloat16)
    logits = words.logits(x)
    assert logits.dtype == jnp.float32
    table = np.asarray(words.table[...].astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(logits, np.asarray(x, np.float64) @ table.T, atol=1e-5)


@pytest.mark.parametrize(("kind", "centre"), [(LayerNorm, True), (RMSNorm, False)])
def test_norms_have_their_own_scale_and_epsilon(kind, centre):
    norm = kind(6, 1e-3, rngs=nnx.Rngs(0))
    x, scale, bias = 0.01 * vectors(2, 3, 6), vectors(6, seed=1), vectors(6, seed=2)
    norm.scale.set_value(jnp.asarray(scale))
    if centre:
        norm.bias.set_value(jnp.asarray(bias))
    centred = x - x.mean(-1, keepdims=True) if centre else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * scale + (bias if centre else 0)
    np.testing.assert_allclose(norm(x), expected, atol=1e-5)
    assert not norm.scale.decay and not (centre and norm.bias.decay)


@pytest.mark.parametrize(("gated", "bias"), [(False, True), (True, False)])
def test_feed_forward_has_the_parts_that_it_is_asked_for(gated, bias):
    layer = FeedForward(
        *(40, 90, "relu", 0.0),
        gated=gated,
        bias=bias,
        initializer=same_normal(0.5),
        output_initializer=same_normal(0.1),
        rngs=nnx.Rngs(0),
    )
    deviations = [float(part.weight[...].std()) for part in (layer.input, layer.gate, layer.output) if part is not None]
    assert deviations == pytest.approx([0.5, 0.5, 0.1] if gated else [0.5, 0.1], rel=0.05)
    assert (layer.input.bias is not None) == (layer.output.bias is not None) == bias
    x = vectors(1, 2, 40)
    hidden = x @ layer.input.weight[...]
    hidden = np.maximum(x @ layer.gate.weight[...], 0) * hidden if gated else np.maximum(hidden, 0)
    np.testing.assert_allclose(layer(x), hidden @ layer.output.weight[...], rtol=1e-4, atol=1e-4)


def test_attention_to_projected_memory_is_attention_to_memory():
    attention = MultiHeadAttention(8, 2, 0.0, rngs=nnx.Rngs(0))
    x, memory = jax.random.normal(jax.random.key(0), (2, 1, 5, 8))
    out, weights = attention(x, memory, mask=F.causal())
    projected, _ = attention(x, attention.project(memory), mask=F.causal())
    np.testing.assert_array_equal(out, projected)
    np.testing.assert_array_equal(jnp.triu(weights, 1), 0)


def test_heads_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match="d_model=8 does not divide into num_heads=3 heads of equal size"):
        MultiHeadAttention(8, 3, 0.0, rngs=nnx.Rngs(0))


def test_heads_of_any_size_and_scores_without_a_scale():
    attention = MultiHeadAttention(
        32, 4, 0.0, num_key_heads=2, head_size=24, bias=False, scale=1.0, initializer=fan_in_normal, rngs=nnx.Rngs(0)
    )
    parts = {name: np.asarray(getattr(attention, name).weight[...]) for name in ("query", "key", "value", "output")}
    assert [part.shape for part in parts.values()] == [(32, 4, 24), (32, 2, 24), (32, 2, 24), (4, 24, 32)]
    # What the scores are not divided by, the queries are.
    deviations = [32**-0.5 * 24**-0.5, 32**-0.5, 32**-0.5, (4 * 24) ** -0.5]
    assert [part.std() for part in parts.values()] == pytest.approx(deviations, rel=0.05)
    x, bias = vectors(2, 3, 32), vectors(1, 4, 3, 3, seed=1)
    out, weights = attention(x, bias=bias)
    query, key, value = (np.einsum("BTD,DNH->BTNH", x, parts[name]) for name in ("query", "key", "value"))
    powers = np.exp(np.einsum("BTNH,BSNH->BNTS", query, np.repeat(key, 2, axis=2)) + bias)
    expected = powers / powers.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    context = np.einsum("BNTS,BSNH->BTNH", expected, np.repeat(value, 2, axis=2))
    np.testing.assert_allclose(out, np.einsum("BTNH,NHD->BTD", context, parts["output"]), atol=1e-5)


def test_rotary_attention_counts_from_the_first_position_unless_told_otherwise():
    attention = MultiHeadAttention(8, 2, 0.0, rotary=Rotary(base=10.0), rngs=nnx.Rngs(0))
    x, places = vectors(1, 5, 8), np.arange(5)[None]
    (_, weights), (_, counted), (_, spread) = (
        attention(x),
        attention(x, positions=places),
        attention(x, positions=3 * places),
    )
    np.testing.assert_array_equal(weights, counted)
    assert not np.allclose(weights, spread, atol=1e-3)
    turned = F.rotary(attention.key(x), places, base=10.0)
    np.testing.assert_array_equal(attention.project(x).key, turned)
    np.testing.assert_array_equal(attention.project(x).value, attention.value(x))


def test_a_cache_is_written_where_it_is_told():
    empty = KeyValue(jnp.zeros((1, 4, 1, 1)), jnp.zeros((1, 4, 1, 1)))
    new = KeyValue(jnp.ones((1, 2, 1, 1)), 2 * jnp.ones((1, 2, 1, 1)))
    written = empty.write(new, 1)
    np.testing.assert_array_equal(written.key.ravel(), [0, 1, 1, 0])
    np.testing.assert_array_equal(written.value.ravel(), [0, 2, 2, 0])
    with pytest.raises(ValueError, match="the cache holds 4 positions; 2 more from position 3 do not fit"):
        empty.write(new, 3)
    with pytest.raises(ValueError, match="the cache holds 4 positions; 5 more do not fit"):
        jax.jit(KeyValue.write)(empty, KeyValue(jnp.ones((1, 5, 1, 1)), jnp.ones((1, 5, 1, 1))), 0)
    # A compiled function cannot raise; it must not move what is written to where it fits.
    assert np.isnan(jax.jit(KeyValue.write)(empty, new, 3).key).any()
    assert jax.jit(KeyValue.write)(empty, new, 2).key.ravel().tolist() == [0, 0, 1, 1]


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
    stack = Stack(Noise, 3, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(0), 2)
    _, noise = stack(lambda block, x, _, key: (x, block(key)), jnp.zeros((2, 1, 2)), dropout_key=keys)
    masks = np.asarray(noise).reshape(6, -1) == 0
    for a in range(6):
        for b in range(a):
            assert 0.4 < (masks[a] == masks[b]).mean() < 0.6


@functools.cache
def make_block(*, cross_attention, dropout_rate=0.0):
    def block():
        rngs = nnx.Rngs(0)
        first, second = (MultiHeadAttention(8, 2, dropout_rate, rngs=rngs) for _ in range(2))
        return Block(
            first,
            FeedForward(8, 12, "relu", 0.0, rngs=rngs),
            cross_attention=second if cross_attention else None,
            norm=lambda: LayerNorm(8, 1e-6, rngs=rngs),
            placement="pre",
            dropout_rate=dropout_rate,
        )

    return jax.jit(block)()


run_block = jax.jit(Block.__call__)


@pytest.mark.parametrize("cross_attention", [False, True])
def test_a_block_is_its_sublayers_one_after_the_other(cross_attention):
    block = make_block(cross_attention=cross_attention)
    x, memory, bias, causal = vectors(2, 3, 8), vectors(2, 5, 8, seed=1), vectors(1, 2, 3, 3, seed=2), F.causal()
    known = np.array([[True] * 5, [True] * 3 + [False] * 2])
    out, cache, auxiliary = run_block(block, x, memory, mask=causal, bias=bias, memory_mask=F.padding(known))
    assert cache is None and auxiliary.balance is None

    @jax.jit
    def sublayers(block, x):
        y, own = block.self_attention(F.layer_norm(x, epsilon=1e-6), mask=causal, bias=bias)
        x, across = x + y, None
        if cross_attention:
            y, across = block.cross_attention(F.layer_norm(x, epsilon=1e-6), memory, mask=F.padding(known))
            x = x + y
        return x + block.feed_forward(F.layer_norm(x, epsilon=1e-6)), own, across

    expected, own, across = sublayers(block, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(auxiliary.self_attention, own, atol=1e-6)
    if cross_attention:
        np.testing.assert_allclose(auxiliary.cross_attention, across, atol=1e-6)
        np.testing.assert_array_equal(auxiliary.cross_attention[1, :, :, 3:], 0)
    else:
        assert auxiliary.cross_attention is None and not hasattr(block, "cross_attention_residual")


def test_a_block_remembers_what_it_is_given_piece_by_piece():
    block = make_block(cross_attention=True)
    x, memory = vectors(2, 6, 8), vectors(2, 5, 8, seed=1)
    whole, _, _ = run_block(block, x, memory, mask=F.causal())
    room, projected = jnp.zeros((2, 8, 2, 4)), jax.jit(MultiHeadAttention.project)(block.cross_attention, memory)
    cache, pieces = KeyValue(room, room), []
    for start in (0, 3):
        piece = x[:, start : start + 3]
        y, cache, _ = run_block(block, piece, projected, mask=F.causal(offset=start), cache=cache, start=start)
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)
    own = np.asarray(cache.key)
    assert (own[:, :6] != 0).all() and (own[:, 6:] == 0).all()


def test_no_two_places_of_a_block_drop_alike(monkeypatch):
    salts = []
    module = importlib.import_module("transformer_jax.functional.dropout")

    def drop(x, salt, rate):
        jax.debug.callback(lambda salt: salts.append(np.asarray(salt)), salt)
        return x

    monkeypatch.setattr(module, "_drop", drop)
    keys = jax.random.split(jax.random.key(0), 2)
    make_block(cross_attention=True, dropout_rate=0.5)(vectors(2, 3, 8), vectors(2, 5, 8), dropout_key=keys)
    jax.effects_barrier()
    # The weights and the output of both attentions, and the output of the feed-forward network; of two rows.
    assert len(salts) == 5 and len({tuple(salt) for rows in salts for salt in rows}) == 10


def test_what_nobody_watches_is_not_kept():
    weights, balance = jnp.ones((1, 1, 2, 2)), F.Balance(*jnp.ones(4))
    assert AuxiliaryOutputs(weights, weights, balance).without_attention() == AuxiliaryOutputs(None, None, balance)


class Scale(nnx.Module):
    """A layer that multiplies."""

    def __init__(self, rngs):
        self.linear = Linear({"embed": 3}, {"other": 3}, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def test_several_streams_go_through_a_stack_and_each_layer_has_its_part():
    stack = Stack(Scale, 4, rngs=nnx.Rngs(0))
    streams = {"a": vectors(2, 5, 3), "b": vectors(2, 1, 3, seed=1)}
    parts = vectors(4, 1, 1, 3, seed=2)

    def layer(block, x, part, key):
        assert key is None
        return {"a": block(x["a"]) + part, "b": block(x["b"]) - x["a"][:, :1]}, x["b"]

    out, auxiliary = stack(layer, streams, per_layer=parts)
    weights, expected = np.asarray(stack.blocks.linear.weight[...]), streams
    assert weights.shape == (4, 3, 3) and stack.blocks.linear.weight.axes == ("layers", "embed", "other")
    for weight, part, before in zip(weights, parts, auxiliary, strict=True):
        np.testing.assert_allclose(before, expected["b"], atol=1e-6)
        a, b = (np.tanh(expected[name] @ weight) for name in ("a", "b"))
        expected = {"a": a + part, "b": b - expected["a"][:, :1]}
    for name in streams:
        np.testing.assert_allclose(out[name], expected[name], atol=1e-5)


class NormalizedScale(Scale):
    """A layer that multiplies, and then normalizes."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = LayerNorm(3, 1e-6, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(super().__call__(x))


def test_linear_maps_are_rounded_before_the_loop_and_nothing_else_is():
    stack = Stack(NormalizedScale, 3, rngs=nnx.Rngs(0))
    x, seen = jnp.asarray(vectors(2, 5, 3), jnp.bfloat16), []

    def layer(block, x, _, key):
        seen.append((block.linear.weight.dtype, block.linear.bias.dtype, block.norm.scale.dtype))
        return block(x), None

    def in_loop(stack):
        return jnp.sum(stack(layer, x)[0].astype(jnp.float32) ** 2)

    def one_by_one(stack):
        y = x
        for number in range(3):
            y = jax.tree.map(lambda leaf, number=number: leaf[number], stack.blocks)(y)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    (loss, gradient), (expected_loss, expected) = (jax.jit(jax.value_and_grad(f))(stack) for f in (in_loop, one_by_one))
    assert {tuple(map(str, dtypes)) for dtypes in seen} == {("bfloat16", "bfloat16", "float32")}
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-2)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=0.1, atol=0.05 * np.abs(b).max())


@pytest.mark.parametrize(("policy", "again_tanh", "again_dots"), [("full", 1, 1), ("dots", 1, 0)])
def test_what_is_computed_again_gives_the_same_gradients(policy, again_tanh, again_dots):
    x, keys = vectors(2, 5, 3), jax.random.split(jax.random.key(0), 2)

    def gradient(stack):
        def loss(stack):
            out, _ = stack(lambda block, x, _, key: (F.dropout(block(x), 0.5, key), None), x, dropout_key=keys)
            return jnp.sum(out**2)

        return jax.grad(loss)(stack)

    kept, again = (Stack(Scale, 3, rematerialize=name, rngs=nnx.Rngs(0)) for name in ("none", policy))
    for a, b in zip(jax.tree.leaves(gradient(kept)), jax.tree.leaves(gradient(again)), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def more(operation):
        in_again, in_kept = (str(jax.make_jaxpr(gradient)(stack)).count(operation) for stack in (again, kept))
        return in_again - in_kept

    assert (more("tanh"), more("dot_general[")) == (again_tanh, again_dots)
    # In a loop, barriers that keep what is computed again apart from what was computed before are nothing but a cost.
    assert "optimization_barrier" not in jax.jit(gradient).lower(again).as_text()
    # Without a loop, the compiler would merge the two, and all would be kept.
    unrolled = Stack(Scale, 3, rematerialize=policy, unroll=3, rngs=nnx.Rngs(0))
    assert "optimization_barrier" in jax.jit(gradient).lower(unrolled).as_text()


def test_products_with_a_batch_axis_are_computed_again_where_those_with_weights_are_kept():
    x = vectors(2, 5, 3)

    def num_products(policy):
        stack = Stack(Scale, 3, rematerialize=policy, rngs=nnx.Rngs(0))

        def loss(stack):
            def layer(block, x, _, key):
                y = block(x)
                return jnp.tanh(jnp.einsum("BTD,BSD->BTS", y, y)) @ x, None

            return jnp.sum(stack(layer, x)[0])

        return str(jax.make_jaxpr(jax.grad(loss))(stack)).count("dot_general[")

    none, dots, without_batch, full = map(num_products, ("none", "dots", "dots_without_batch", "full"))
    assert none == dots < without_batch < full


def test_an_unknown_policy_is_named():
    with pytest.raises(ValueError, match="rematerialize='some' is unknown; choose none, full, dots"):
        Stack(Scale, 3, rematerialize="some", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("inputs", [{"embed": 4}, {"heads": 2, "embed": 4}])
def test_an_axis_cannot_be_input_and_output(inputs):
    with pytest.raises(ValueError, match="the axis 'embed' is an input and an output; give one of them another name"):
        Linear(inputs, {"embed": 4}, rngs=nnx.Rngs(0))


def test_layers_compiled_as_one_piece_compute_the_same():
    x, keys = vectors(2, 5, 3), jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def run(stack):
        return stack(lambda block, x, _, key: (F.dropout(block(x), 0.5, key), x), x, dropout_key=keys)

    one, two = (Stack(Scale, 3, unroll=unroll, rngs=nnx.Rngs(0)) for unroll in (1, 2))
    for a, b in zip(jax.tree.leaves(run(one)), jax.tree.leaves(run(two)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert str(jax.make_jaxpr(run)(two)).count("unroll=2") == 1
