from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.weights import fill, named
from transformer_jax.errors import UserError
from transformer_jax.functional import Balance
from transformer_jax.layers import (
    Experts,
    ExpertsConfig,
    FeedForward,
    balance_loss,
    fan_in_normal,
    feed_forward_or_experts,
    same_normal,
)

CONFIG = ExpertsConfig(num_experts=4, capacity_factor=None)

run = jax.jit(Experts.__call__)


def make(config=CONFIG, d_model=6, d_ff=10, **options):
    options = {"activation": "relu", "dropout_rate": 0.0} | options
    return jax.jit(lambda: Experts(d_model, d_ff, config, **options, rngs=nnx.Rngs(0)))()


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)


def test_the_axis_of_experts_is_named_and_only_matrices_decay():
    layer = jax.eval_shape(lambda: Experts(6, 10, CONFIG, "relu", 0.0, gated=True, rngs=nnx.Rngs(0)))
    parameters = {
        name: (part.axes, part.shape, part.decay) for name, part in vars(layer).items() if hasattr(part, "axes")
    }
    assert parameters == {
        "router": (("embed", "experts"), (6, 4), True),
        "weight_in": (("experts", "embed", "ff"), (4, 6, 10), True),
        "gate": (("experts", "embed", "ff"), (4, 6, 10), True),
        "weight_out": (("experts", "ff", "embed"), (4, 10, 6), True),
        "bias_in": (("experts", "ff"), (4, 10), False),
        "bias_out": (("experts", "embed"), (4, 6), False),
    }


def test_each_expert_is_drawn_by_itself_as_one_network_would_be():
    layer = make(d_model=40, d_ff=90, gated=True, bias=False, initializer=fan_in_normal)
    for part, deviation in ((layer.weight_in, 40**-0.5), (layer.gate, 40**-0.5), (layer.weight_out, 90**-0.5)):
        experts = np.asarray(part[...]).reshape(4, -1)
        assert experts.std(axis=1) == pytest.approx(deviation, rel=0.05)
        assert np.abs(np.corrcoef(experts) - np.eye(4)).max() < 0.1
    assert float(layer.router[...].std()) == pytest.approx(40**-0.5, rel=0.2)
    assert layer.bias_in is None and layer.bias_out is None
    residual = make(d_model=40, d_ff=90, initializer=same_normal(0.02), output_initializer=same_normal(0.005))
    deviations = [float(part[...].std()) for part in (residual.weight_in, residual.weight_out)]
    assert deviations == pytest.approx([0.02, 0.005], rel=0.05)
    assert residual.gate is None and not residual.bias_in[...].any() and not residual.bias_out[...].any()


@pytest.mark.parametrize(("gated", "bias"), [(False, True), (True, False)])
def test_one_expert_is_the_feed_forward_network(gated, bias, x):
    random, options = np.random.default_rng(1), {"gated": gated, "bias": bias}
    one = ExpertsConfig(1, num_chosen=1, capacity_factor=None)
    experts = jax.eval_shape(lambda: Experts(6, 10, one, "gelu", 0.0, **options, rngs=nnx.Rngs(0)))
    network = jax.eval_shape(lambda: FeedForward(6, 10, "gelu", 0.0, **options, rngs=nnx.Rngs(0)))
    weights = {name: random.normal(size=leaf.shape) for name, leaf in named(experts).items()}
    parts = {"weight_in": "input/weight", "weight_out": "output/weight", "gate": "gate/weight"}
    parts |= {"bias_in": "input/bias", "bias_out": "output/bias"}
    network = fill(network, {parts[name]: value[0] for name, value in weights.items() if name != "router"})
    y, balance = run(fill(experts, weights), x)
    np.testing.assert_allclose(y, jax.jit(FeedForward.__call__)(network, x), rtol=1e-5, atol=1e-4)
    assert [float(part) for part in (balance.loss, balance.weight, balance.dropped)] == pytest.approx([14, 14, 0])


def test_padding_gets_nothing_and_room_is_as_the_config_says(x):
    valid = np.arange(7)[None] < np.array([[7], [4]])
    roomy, tight = make(), make(replace(CONFIG, capacity_factor=0.5))
    (all_of, none_dropped), (some_of, dropped) = run(roomy, x, valid=valid), run(tight, x, valid=valid)
    assert none_dropped.dropped == 0 and none_dropped.weight == dropped.weight == 11
    # Two choices of each token; an expert takes ceil(0.5 * 2 * 7 / 4) of the first row's, ceil(0.5 * 2 * 4 / 4) of the
    # second's, and there are four: at most 12 of 22 choices are heard.
    assert dropped.dropped >= 10 and not np.allclose(all_of, some_of, atol=1e-3)
    for y in (all_of, some_of):
        np.testing.assert_array_equal(y[1, 4:], 0)


def test_dropout_is_inside_the_experts(x):
    layer = make(dropout_rate=0.5)
    keys = jax.random.split(jax.random.key(0), 2)
    same = np.broadcast_to(x[:1], x.shape)
    (dropped, _), (whole, _) = run(layer, same, dropout_key=keys), run(layer, same)
    assert not np.allclose(dropped[0], dropped[1], atol=1e-3) and not np.allclose(dropped[0], whole[0], atol=1e-3)
    np.testing.assert_array_equal(whole[0], whole[1])


def test_the_config_says_whether_there_are_experts():
    initializers = {"initializer": same_normal(0.5), "output_initializer": same_normal(0.1)}

    @partial(jax.jit, static_argnums=0)
    def either(experts):
        rates = ("gelu", 0.25)
        return feed_forward_or_experts(
            30, 80, experts, *rates, gated=True, bias=False, **initializers, rngs=nnx.Rngs(0)
        )

    network, experts = either(None), either(CONFIG)
    assert type(network) is FeedForward and type(experts) is Experts
    of_network = [part.weight for part in (network.input, network.gate, network.output)]
    for parts in (of_network, [experts.weight_in, experts.gate, experts.weight_out]):
        assert [float(part[...].std()) for part in parts] == pytest.approx([0.5, 0.5, 0.1], rel=0.05)
    assert network.input.bias is None and experts.bias_in is None
    assert (network.activation, network.dropout_rate) == (experts.activation, experts.dropout_rate) == ("gelu", 0.25)


def test_the_balance_of_all_layers_adds_up():
    """Two layers, of losses 10 and 20 and squared logits 3 and 5."""
    balance = Balance(jnp.array([10.0, 20.0]), jnp.array([3.0, 5.0]), jnp.zeros(2), jnp.ones(2))
    config = replace(CONFIG, balance_weight=0.01, logit_weight=0.001)
    assert balance_loss(balance, config) == pytest.approx(0.01 * 30 + 0.001 * 8)
    assert balance_loss(None, config) == balance_loss(balance, None) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, "num_chosen=2 must be from 1 to num_experts=1"),
        ({"num_experts": 4, "num_chosen": 0}, "num_chosen=0 must be from 1 to num_experts=4"),
        ({"num_experts": 4, "capacity_factor": 0.0}, "capacity_factor=0.0 must be above 0; None has room for every"),
    ],
)
def test_impossible_experts_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ExpertsConfig(**options)
