from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.tiny_xlnet import (
    ALL_ALLOWED,
    ALL_VALID,
    CONFIG,
    LENGTH,
    NO_TYPES,
    ONE_SIDED,
    PAD,
    ROWS,
    VOCAB,
    Naive,
    Text,
    abstract,
    attention,
    filled,
    forward,
    hidden_and_memory,
    leaves,
    make,
    predict,
    weights_of,
)
from transformer_jax.errors import UserError
from transformer_jax.models.xlnet import XLNet, XLNetConfig
from transformer_jax.training import decays


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (XLNetConfig.base(), 116_718_336 + 32_000),
        (replace(XLNetConfig.base(), lm_head=False), 116_718_336),
        (XLNetConfig.large(), 360_268_800 + 32_000),
    ],
)
def test_published_parameter_counts(config, expected):
    assert sum(leaf.size for leaf in leaves(abstract(config)).values()) == expected
    assert config.d_model // config.num_heads == 64


def test_two_streams_agree_with_the_papers_written_out_pair_by_pair():
    text, weights = Text(), weights_of(CONFIG)
    model, options = filled(CONFIG, weights), {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    query, memory = hidden_and_memory(model, text.ids, text.types, target_positions=text.places, **options)
    watched = attention(model, text.ids, text.types, **options)
    logits = model.logits(query)
    for row in range(ROWS):
        expected = Naive(weights, CONFIG)(text, row)
        np.testing.assert_allclose(query[row], expected.query, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(memory[:, row], expected.memory, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(watched[:, row], expected.weights, rtol=1e-4, atol=1e-5)
        scores = expected.query @ weights["embedding/table"].T + weights["lm_head/bias"]
        np.testing.assert_allclose(logits[row], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, ONE_SIDED])
def test_one_stream_agrees_with_the_papers_written_out_pair_by_pair(config):
    text, weights = Text(), weights_of(config)
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    content, memory = hidden_and_memory(filled(config, weights), text.ids, text.types, **options)
    for row in range(ROWS):
        expected = Naive(weights, config)(text, row)
        np.testing.assert_allclose(content[row], expected.content, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(memory[:, row], expected.memory, rtol=1e-4, atol=1e-5)


def test_vectors_of_small_variance_are_normalized_as_there():
    """Where 1e-12 beside the variance is much, and anything more is too much."""
    text, weights = Text(), dict(weights_of(CONFIG))
    for name in ("embedding/table", "mask_embedding", "encoder/blocks/self_attention/output/weight"):
        weights[name] = weights[name] * 1e-6
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    content, _ = hidden_and_memory(filled(CONFIG, weights), text.ids, text.types, **options)
    np.testing.assert_allclose(content[0], Naive(weights, CONFIG)(text, 0).content, rtol=1e-4, atol=1e-4)


def changes(function, ids):
    """Whether output [row, place] changes with the token at [row, j], as an array [row, place, j]."""
    before = np.asarray(function(ids))
    changed = []
    for j in range(LENGTH):
        other = ids.copy()
        other[:, j] = (ids[:, j] - PAD) % (VOCAB - PAD - 1) + PAD + 1
        assert (other != ids).sum() == ROWS
        changed.append(np.abs(function(other) - before).max(axis=-1) > 1e-4)
    return np.stack(changed, axis=-1)


def test_each_stream_depends_on_just_what_it_may_see():
    """On any path of three layers, of which the query stream takes the last. No place knows its own token."""
    text, model = Text(), make()
    # Any mask will do, not just that of an order. The first row has a place that sees nothing.
    text.allowed &= np.random.default_rng(1).random(text.allowed.shape) < 0.5
    text.allowed[0, text.places[0, 0]] = False
    options = {"valid": ALL_VALID, "allowed": text.allowed}

    content = changes(lambda ids: hidden_and_memory(model, ids, text.types, **options)[0], text.ids)
    query = changes(lambda ids: predict(model, ids, text.places, text.types, **options), text.ids)
    for row in range(ROWS):
        sees = text.allowed[row].astype(int)
        sees_itself = np.maximum(sees, np.eye(LENGTH, dtype=int))
        np.testing.assert_array_equal(content[row], np.linalg.matrix_power(sees_itself, 3) > 0)
        np.testing.assert_array_equal(query[row], (sees @ np.linalg.matrix_power(sees_itself, 2) > 0)[text.places[row]])
    assert not query[0, 0].any()


def test_an_order_of_prediction_hides_each_token_from_its_own_place():
    text, model = Text(), make()
    options = {"valid": ALL_VALID, "allowed": text.allowed}
    content = changes(lambda ids: hidden_and_memory(model, ids, text.types, **options)[0], text.ids)
    query = changes(lambda ids: predict(model, ids, text.places, text.types, **options), text.ids)
    for row in range(ROWS):
        assert content[row].diagonal().all()
        np.testing.assert_array_equal(query[row], text.allowed[row, text.places[row]])


def test_a_text_in_pieces_with_memory_equals_the_text_in_one():
    """Where no token sees a later one, a memory of all that came before leaves nothing out."""
    first, second, model = Text(0), Text(1), make()
    tril = np.tril(ALL_ALLOWED)
    _, memory = hidden_and_memory(model, first.ids, NO_TYPES, valid=ALL_VALID, allowed=tril)
    x, memory = hidden_and_memory(model, second.ids, NO_TYPES, valid=ALL_VALID, allowed=tril, memory=memory)
    ids = np.concatenate([first.ids, second.ids], axis=1)
    whole = forward(
        model, ids, allowed=np.tril(np.ones((ROWS, 2 * LENGTH, 2 * LENGTH), bool)), segments=np.zeros_like(ids)
    )
    np.testing.assert_allclose(x, whole[:, LENGTH:], rtol=1e-4, atol=1e-5)
    assert memory.shape == (CONFIG.num_layers, ROWS, 2 * LENGTH, CONFIG.d_model)


def test_no_gradient_flows_into_what_is_remembered():
    text = Text()
    gradients = jax.jit(jax.grad(lambda model: jnp.sum(model.hidden_and_memory(text.ids)[1])))(make())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))


def test_padding_and_other_examples_in_a_row_change_nothing():
    """A text alone, and with padding on the left (as XLNet has it), on both sides, and with another beside it."""
    text, model = Text(), make()
    alone, _ = hidden_and_memory(model, text.ids, NO_TYPES, valid=ALL_VALID, allowed=ALL_ALLOWED)
    ids = np.full((ROWS, 2 * LENGTH), PAD)
    ids[0, LENGTH:], ids[1, 2 : LENGTH + 2] = text.ids[0], text.ids[1]
    ids[2] = np.concatenate([text.ids[0], text.ids[2]])
    segments = np.zeros_like(ids)
    segments[2, LENGTH:] = 1
    together = forward(model, ids, allowed=np.ones((ROWS, 2 * LENGTH, 2 * LENGTH), bool), segments=segments)
    np.testing.assert_allclose(together[0, LENGTH:], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[1, 2 : LENGTH + 2], alone[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[2, :LENGTH], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[2, LENGTH:], alone[2], rtol=1e-4, atol=1e-5)


def test_dropout_is_a_function_of_the_key_of_the_row():
    text, model, others = Text(), make(replace(CONFIG, dropout_rate=0.25)), np.array([2, 0, 1])
    keys = jax.random.split(jax.random.key(0), ROWS)
    noisy = np.asarray(forward(model, text.ids, dropout_key=keys))
    np.testing.assert_allclose(forward(model, text.ids[others], dropout_key=keys[others]), noisy[others], atol=1e-5)
    assert not np.allclose(forward(model, text.ids, dropout_key=keys[others]), noisy, atol=0.1)


@pytest.mark.parametrize(
    ("rates", "one_stream", "two_streams"),
    [
        # Embedding, distances, last; weights, output of attention, inside and output of feed-forward.
        ({}, 3 + 4, 4 + 4 + 4),
        ({"attention_dropout_rate": 0.0}, 3 + 3, 4 + 3 + 3),
        ({"dropout_rate": 0.0}, 1, 2),
    ],
)
def test_dropout_is_everywhere_that_the_config_says(rates, one_stream, two_streams):
    text, keys = Text(), jax.random.split(jax.random.key(0), ROWS)

    def number(places):
        model = abstract(replace(CONFIG, **rates))
        function = partial(XLNet.hidden_and_memory, target_positions=places, allowed=text.allowed)
        return str(jax.make_jaxpr(function)(model, text.ids, dropout_key=keys)).count("random_bits[")

    assert (number(None), number(text.places)) == (one_stream, two_streams)


def test_distances_are_dropped_row_by_row():
    keys = jax.random.split(jax.random.key(0), ROWS)
    model = make(replace(CONFIG, dropout_rate=0.25))
    distances = np.asarray(jax.jit(lambda model: model._distances(32, 32, keys))(model))
    assert distances.shape == (ROWS, 64, CONFIG.d_model)
    assert (distances == 0).mean() == pytest.approx(0.25, abs=0.05)
    assert not np.array_equal(distances[0] == 0, distances[1] == 0)


def test_bfloat16_computation_stays_near_float32():
    text, config = Text(), replace(CONFIG, dtype="bfloat16")
    x, _ = hidden_and_memory(make(config), text.ids)
    np.testing.assert_allclose(x.astype(jnp.float32), hidden_and_memory(make(), text.ids)[0], atol=0.1)
    far, expected = (jax.jit(lambda m: m._distances(1, 600, None))(make(each)) for each in (config, CONFIG))
    np.testing.assert_allclose(far.astype(jnp.float32), expected, atol=0.01)
    options = {"target_positions": text.places, "allowed": text.allowed, "memory": text.memory}
    x, memory = jax.eval_shape(partial(XLNet.hidden_and_memory, **options), abstract(config), text.ids)
    assert x.dtype == memory.dtype == jnp.bfloat16
    assert jax.eval_shape(XLNet.logits, abstract(config), x).dtype == jnp.float32


def test_compiles_the_same_program_for_every_depth():
    text = Text()

    def equations(depth):
        model = abstract(replace(CONFIG, num_layers=depth))
        function = partial(XLNet.predict, allowed=text.allowed)
        return str(jax.make_jaxpr(function)(model, text.ids, text.places)).count("dot_general")

    assert equations(2) == equations(12)


def test_all_but_biases_and_norms_begin_with_the_same_deviation():
    config = replace(CONFIG, d_model=160, num_heads=4, d_ff=320, num_layers=2)
    model = jax.jit(lambda: XLNet(config, rngs=nnx.Rngs(0)))()
    for name, leaf in leaves(jax.device_get(model)).items():
        if name == "lm_head/bias" or "norm/bias" in name or ("feed_forward" in name and "/bias" in name):
            assert not leaf.any()
        elif "norm/scale" in name:
            assert (leaf == 1).all()
        else:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.15), name


def test_every_parameter_names_its_axes():
    parameters = jax.tree.leaves(abstract(CONFIG), is_leaf=lambda x: isinstance(x, nnx.Param))
    assert len(parameters) == 20
    assert all(len(parameter.axes) == len(parameter.shape) for parameter in parameters)
    part = abstract(CONFIG).encoder.blocks.self_attention
    assert part.distance.weight.axes == ("layers", "embed", "heads", "head")
    assert part.type_embedding.axes == ("layers", "type", "heads", "head")


def test_matrices_decay_and_nothing_else_does():
    decayed = {name for name, decay in leaves(decays(abstract(CONFIG))).items() if decay}
    projections = ("query", "key", "value", "distance", "output")
    assert decayed == {
        "embedding/table",
        *(f"encoder/blocks/self_attention/{name}/weight" for name in projections),
        *(f"encoder/blocks/feed_forward/{way}/weight" for way in ("input", "output")),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide d_model=20; set num_heads to a divisor such as 2"),
        ({"d_model": 15}, "d_model=15 is odd"),
        ({"memory_length": 0}, "memory_length must be at least 1; got 0"),
        ({"max_distance": 0}, "max_distance must be at least 1; got 0"),
        ({"attention_dropout_rate": 1.0}, "attention_dropout_rate must be at least 0 and below 1; got 1.0"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **options)
    with pytest.raises(UserError, match="vocab_size and pad_id come from the tokenizer"):
        XLNet(replace(CONFIG, pad_id=None), rngs=nnx.Rngs(0))


def test_mistakes_are_named():
    text, model = Text(), make()
    options = {"valid": ALL_VALID, "allowed": text.allowed}
    for move, outside in ((1, 6), (-1, -1)):
        with pytest.raises(ValueError, match=f"target position {outside} is outside the row of 6 tokens"):
            jax.eval_shape(partial(model.predict, target_positions=text.places + move, **options), text.ids)
    # A compiled function cannot raise; it must not pass off another place's logits either.
    for move in (-1, 1):
        places = text.places + move
        outside = (places < 0) | (places >= LENGTH)
        logits = np.asarray(predict(model, text.ids, places, text.types, **options))
        np.testing.assert_array_equal(np.isnan(logits).all(axis=-1), outside)
    with pytest.raises(ValueError, match=r"memory has the shape \(3, 2, 6, 20\); .* need \(3, 3, 6, 20\)"):
        model(text.ids, memory=text.memory[:, :2])
    with pytest.raises(TypeError, match="mask must be boolean, True where attention is allowed; got float32"):
        model(text.ids, allowed=1 - text.allowed.astype(np.float32))
