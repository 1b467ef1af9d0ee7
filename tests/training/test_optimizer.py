"""Which weights are trained, and how fast."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.layers import named_parameters
from transformer_jax.models import BertConfig
from transformer_jax.training import OptimizerConfig, decays

RATE = 0.5
BERT = replace(
    BertConfig.base(12),
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_layers=3,
    max_length=8,
    heads=("pooler", "classifier"),
    num_labels=2,
)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: BERT.build(nnx.Rngs(0)))()


def updates(model, **settings):
    """The first update for a gradient of ones, by the names of the weights. Adam makes -1 times the rate of it."""
    optimizer = OptimizerConfig(schedule="linear", peak=RATE, warmup_steps=1, total_steps=10, **settings).build(16)
    gradients = jax.tree.map(jnp.ones_like, model)
    return named_parameters(jax.jit(lambda: optimizer.update(gradients, optimizer.init(model), model)[0])())


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.3, "clip_norm": 0.1}])
def test_what_is_frozen_is_not_changed_by_a_bit_and_all_else_is_as_without(model, settings):
    found, without = updates(model, freeze="embedding|encoder.*attention", **settings), updates(model, **settings)
    before = named_parameters(model)
    frozen = {name for name in before if name.startswith("embedding") or ("encoder" in name and "attention" in name)}
    assert 5 < len(frozen) < len(before)
    for name, update in found.items():
        after = before[name][...] + update[...]
        assert np.array_equal(after, before[name][...]) == (name in frozen), name
        if name not in frozen:
            np.testing.assert_allclose(update[...], without[name][...], rtol=1e-5)


def test_a_frozen_weight_has_no_moments(model):
    optimizer = OptimizerConfig(freeze="(?!pooler)").build(16)
    size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, model)))
    pooler = sum(leaf.size for leaf in jax.tree.leaves(model.pooler))
    assert 2 * pooler <= size <= 2 * pooler + 2  # Adam's two means, and the counts of steps


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("embeding", r"optimizer.freeze='embeding' matches no parameter; the names begin with .*embedding, .*pooler"),
        ("able", r"matches no parameter"),  # of embedding.table, but not at its beginning
        ("", r"matches every parameter; the names begin with"),
    ],
)
def test_a_pattern_that_divides_nothing_names_what_there_is(model, freeze, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(freeze=freeze).build(16).init(model)


def test_a_pattern_that_is_none_is_named():
    with pytest.raises(UserError, match=r"freeze='\(' is not a regular expression"):
        OptimizerConfig(freeze="(")


def test_each_layer_below_the_top_learns_slower_by_a_factor(model):
    decay, depth = 0.5, BERT.num_layers
    for name, update in updates(model, layer_decay=decay).items():
        if name.startswith("encoder."):
            powers = np.array([decay ** (depth - 1 - layer) for layer in range(depth)])
            expected = -RATE * np.broadcast_to(powers.reshape(-1, *[1] * (update.ndim - 1)), update.shape)
        else:
            expected = -RATE * decay**depth if "embedding" in name else -RATE
        np.testing.assert_allclose(update[...], expected, rtol=1e-5, err_msg=name)


def test_stacks_of_two_kinds_count_their_own_layers():
    config = replace(tiny.CONFIG, num_encoder_layers=1, num_decoder_layers=2)
    found = updates(tiny.make(config), layer_decay=0.1)
    encoder, decoder = (found[f"{stack}.blocks.feed_forward.input.bias"][:, 0] for stack in ("encoder", "decoder"))
    np.testing.assert_allclose(encoder, [-RATE], rtol=1e-5)
    np.testing.assert_allclose(decoder, [-RATE * 0.1, -RATE], rtol=1e-5)
    np.testing.assert_allclose(found["embedding.table"][...], -RATE * 0.01, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_a_factor_that_cannot_be_is_named(decay):
    with pytest.raises(UserError, match=f"layer_decay must be over 0 and at most 1; got {decay}"):
        OptimizerConfig(layer_decay=decay)


@pytest.mark.parametrize("freeze", ["embedding", "embedding|encoder"])
def test_layers_learn_slower_also_where_others_are_frozen(model, freeze):
    slower, frozen = updates(model, layer_decay=0.5), updates(model, layer_decay=0.5, freeze=freeze)
    for name, update in frozen.items():
        expected = np.zeros(update.shape) if re.match(freeze, name) else slower[name][...]
        np.testing.assert_allclose(update[...], expected, rtol=1e-6, err_msg=name)


def test_frozen_parameters_have_no_backward_pass(model):
    config = OptimizerConfig(freeze="embedding|encoder|position|type")

    def loss(model, stop):
        model = config.without_frozen_gradients(model) if stop else model
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model))

    gradients = {stop: named_parameters(jax.grad(loss)(model, stop)) for stop in (False, True)}
    for name, gradient in gradients[True].items():
        is_frozen = re.match("embedding|encoder|position|type", name)
        expected = np.zeros(gradient.shape) if is_frozen else gradients[False][name][...]
        np.testing.assert_array_equal(gradient[...], expected, err_msg=name)


def test_layers_of_flax_itself_decay_by_their_rank():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = {name: leaf.get_value() for name, leaf in named_parameters(decays(layer)).items()}
    assert found == {"kernel": True, "bias": False}
    optimizer = OptimizerConfig(schedule="linear", total_steps=5, weight_decay=0.1, layer_decay=0.5).build(None)
    found, _ = optimizer.update(layer, optimizer.init(layer), layer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
