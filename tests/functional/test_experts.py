import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax import functional as F
from transformer_jax.functional.dropout import split
from transformer_jax.functional.experts import mixture_of_experts

mixture = jax.jit(mixture_of_experts, static_argnames=("activation", "num_chosen", "capacity_factor", "dropout_rate"))

B, T, D, E, HIDDEN = 5, 9, 4, 4, 6


def parameters(num_experts=E, *, biases=True, gated=False):
    random = np.random.default_rng(0)
    shapes = {
        "router": (D, num_experts),
        "weight_in": (num_experts, D, HIDDEN),
        "weight_out": (num_experts, HIDDEN, D),
        "bias_in": (num_experts, HIDDEN) if biases else None,
        "bias_out": (num_experts, D) if biases else None,
        "gate": (num_experts, D, HIDDEN) if gated else None,
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if shape}


def tokens(rows=B, length=T):
    return np.random.default_rng(1).normal(size=(rows, length, D)).astype(np.float32)


def some_valid():
    """Rows with padding at the end, at the beginning, in between, everywhere and nowhere."""
    valid = np.ones((B, T), bool)
    valid[0, -2:] = valid[1, :3] = valid[2, 2:5] = valid[3] = False
    return valid


def constants(router=None):
    """Experts that return 1, 2, 3 and so on, whatever they get. By default the tokens are the router's logits."""
    p = {name: np.zeros_like(array) for name, array in parameters().items()}
    p["router"] = np.eye(D, E, dtype=np.float32) if router is None else router
    p["bias_out"] += np.arange(1, E + 1, dtype=np.float32)[:, None]
    return p


def one_at_a_time(x, p, k, factor, valid):
    """Token by token and expert by expert, in double precision; relu, or silu where there is a gate."""
    x, p = x.astype(np.float64), {name: array.astype(np.float64) for name, array in p.items()}
    y, sums = np.zeros(x.shape), {"loss": 0.0, "z_loss": 0.0, "dropped": 0, "weight": 0}

    def expert(e, token):
        hidden = token @ p["weight_in"][e] + (p["bias_in"][e] if "bias_in" in p else 0)
        if "gate" in p:
            gate = token @ p["gate"][e]
            hidden = gate / (1 + np.exp(-gate)) * hidden
        else:
            hidden = np.maximum(hidden, 0)
        return hidden @ p["weight_out"][e] + (p["bias_out"][e] if "bias_out" in p else 0)

    for row in range(B):
        present = np.flatnonzero(valid[row])
        room = [T if factor is None else math.ceil(Fraction(str(factor)) * k * len(present) / E)] * E
        logits = {t: x[row, t] @ p["router"] for t in present}
        probabilities = {t: np.exp(logits[t]) / np.exp(logits[t]).sum() for t in present}
        wish = {t: sorted(range(E), key=lambda e, t=t: (-logits[t][e], e))[:k] for t in present}
        for choice in range(k):
            for t in present:
                e = wish[t][choice]
                if room[e] == 0:
                    sums["dropped"] += 1
                    continue
                room[e] -= 1
                share = probabilities[t][e] / (probabilities[t][wish[t]].sum() if k > 1 else 1)
                y[row, t] += share * expert(e, x[row, t])
        for e in range(E if len(present) else 0):
            fraction = sum(e in wish[t] for t in present) / (k * len(present))
            sums["loss"] += len(present) * E * fraction * np.mean([probabilities[t][e] for t in present])
        sums["z_loss"] += sum(np.log(np.exp(logits[t]).sum()) ** 2 for t in present)
        sums["weight"] += len(present)
    return y, sums


def assert_same(actual, expected, tolerance=2e-5):
    (y, balance), (expected_y, sums) = actual, expected
    np.testing.assert_allclose(y, expected_y, rtol=tolerance, atol=tolerance)
    for name, value in (sums if isinstance(sums, dict) else vars(sums)).items():
        np.testing.assert_allclose(getattr(balance, name), value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("factor", [None, 0.6])
@pytest.mark.parametrize(("k", "biases", "gated"), [(1, True, False), (2, True, False), (3, False, True)])
def test_is_each_token_by_its_experts_as_long_as_there_is_room(k, biases, gated, factor):
    p, x, valid = parameters(biases=biases, gated=gated), tokens(), some_valid()
    expected = one_at_a_time(x, p, k, factor, valid)
    assert (expected[1]["dropped"] > 0) == (factor is not None)  # the case shows something
    run = partial(mixture, activation="silu" if gated else "relu", num_chosen=k, capacity_factor=factor)
    assert_same(run(x, **p, valid=valid), expected)


def test_without_padding_every_token_is_valid():
    p, x = parameters(), tokens()
    expected = one_at_a_time(x, p, 2, 0.6, np.ones((B, T), bool))
    assert_same(mixture(x, **p, num_chosen=2, capacity_factor=0.6), expected)


@pytest.mark.parametrize(("factor", "keys"), [(None, jax.random.split(jax.random.key(0), B)), (1.0, jax.random.key(0))])
def test_one_expert_is_the_feed_forward_network(factor, keys):
    p, x = parameters(1, gated=True), tokens()
    options = {"activation": "gelu", "dropout_rate": 0.5}
    y, balance = mixture(x, **p, num_chosen=1, capacity_factor=factor, dropout_key=keys, **options)
    network = {name: array[0] for name, array in p.items() if name != "router"}
    expected = jax.jit(partial(F.feed_forward, **options))(x, **network, dropout_key=split(keys, 1)[0])
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    assert (balance.loss, balance.weight, balance.dropped) == (B * T, B * T, 0)


def test_room_for_all_is_the_dense_mixture_of_the_chosen():
    p, x, valid = parameters(), tokens(), np.ones((B, T), bool)
    logits = x @ p["router"]
    powers = np.where(logits >= np.sort(logits, axis=-1)[..., -2:-1], np.exp(logits), 0)
    names = ("weight_in", "weight_out", "bias_in", "bias_out")
    networks = np.stack([F.feed_forward(x, *(p[name][e] for name in names)) for e in range(E)], axis=2)
    expected = np.einsum("BTE,BTED->BTD", powers / powers.sum(-1, keepdims=True), networks)
    for factor in (None, 2.0, 1e12):  # twice an even share, with two of four experts, is room for all
        y, balance = mixture(x, **p, num_chosen=2, capacity_factor=factor, valid=valid)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        assert balance.dropped == 0


def test_first_choices_go_before_second_ones_and_early_tokens_before_late_ones():
    """Of nine tokens an expert takes three: ceil(0.6 * 2 * 9 / 4)."""
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    wishes = [(1, 0), (1, 0), (2, 1), (0, 1), (0, 1), (2, 3), (2, 3), (2, 0), (3, 2)]
    x = np.zeros((B, T, D), np.float32)
    for token, (best, next_best) in enumerate(wishes):
        x[:, token, best], x[:, token, next_best] = 2, 1
    y, balance = mixture(x, **constants(), num_chosen=2, capacity_factor=0.6, valid=np.ones((B, T), bool))
    expected = [2 * first + second, 2 * first, 3 * first + 2 * second, first, first]
    expected += [3 * first + 4 * second, 3 * first + 4 * second, 0, 4 * first]
    np.testing.assert_allclose(y, np.broadcast_to(np.array(expected)[None, :, None], y.shape), rtol=1e-6)
    assert balance.dropped == B * 6


def test_of_equal_experts_the_first_are_chosen():
    p = constants(np.zeros((D, E), np.float32))
    for k, expected in [(1, 1 / 4), (2, (1 + 2) / 2)]:
        y, _ = mixture(tokens(), **p, num_chosen=k, capacity_factor=None, valid=np.ones((B, T), bool))
        np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_a_rounding_error_makes_no_room():
    """Each of ten tokens goes to all three experts; 0.1 * 3 * 10 / 3 is 1.0000000000000002 in floating point."""
    _, balance = mixture(tokens(1, 10), **parameters(3), num_chosen=3, capacity_factor=0.1)
    assert balance.dropped == 3 * (10 - 1)


@pytest.mark.parametrize("factor", [None, 0.6])
def test_a_row_does_not_depend_on_its_batch(factor):
    p, x, valid = parameters(), tokens(), some_valid()
    run = partial(mixture, **p, num_chosen=2, capacity_factor=factor)
    y, whole = run(x, valid=valid)
    alone = [run(x[row : row + 1], valid=valid[row : row + 1]) for row in range(B)]
    added = jax.tree.map(lambda *parts: sum(parts), *(balance for _, balance in alone))
    assert_same((y, whole), (np.concatenate([one for one, _ in alone]), added), 1e-6)
    order = np.array([3, 0, 4, 1, 2])
    assert_same(run(x[order], valid=valid[order]), (y[order], whole), 1e-6)


@pytest.mark.parametrize("factor", [None, 0.6])
def test_nothing_depends_on_the_padding(factor):
    p, x = parameters(), tokens(B, 5)
    run = partial(mixture, **p, num_chosen=2, capacity_factor=factor)
    bare = run(x, valid=np.ones((B, 5), bool))
    assert factor is None or bare[1].dropped > 0
    for before, after, filler in [(0, 4, 1.0), (4, 0, 1e30), (3, 1, np.nan)] + [(0, 64, 1.0)] * (factor is not None):
        padded = np.pad(x, ((0, 0), (before, after), (0, 0)), constant_values=filler)
        valid = np.pad(np.ones((B, 5), bool), ((0, 0), (before, after)))
        y, balance = run(padded, valid=valid)
        assert_same((y[:, before : before + 5], balance), bare, 1e-6)
        np.testing.assert_array_equal(y[~valid], 0)


@partial(jax.jit, static_argnames=("k", "factor"))
def value_and_gradients(p, valid, k, factor):
    def value(p):
        y, balance = mixture(**p, activation="silu", num_chosen=k, capacity_factor=factor, valid=valid)
        return jnp.sum(jnp.sin(y)) + 0.3 * balance.loss + 0.1 * balance.z_loss

    return jax.value_and_grad(value)(p)


@pytest.fixture
def double():
    with jax.enable_x64(True):
        p = parameters(gated=True) | {"x": tokens()}
        yield {name: array.astype(np.float64) for name, array in p.items()}


@pytest.mark.parametrize(("k", "factor"), [(1, None), (2, 0.6)])
def test_gradients_are_those_of_finite_differences(double, k, factor):
    valid = some_valid()
    logits = np.sort(double["x"] @ double["router"], axis=-1)
    assert np.diff(logits)[valid].min() > 4e-4  # no choice changes within a step
    _, gradients = value_and_gradients(double, valid, k, factor)
    for name, array in double.items():
        step = 1e-5 * np.random.default_rng(2).normal(size=array.shape)
        above, below = (value_and_gradients(double | {name: array + s}, valid, k, factor)[0] for s in (step, -step))
        np.testing.assert_allclose(2 * np.vdot(gradients[name], step), above - below, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(("k", "factor"), [(1, None), (2, 0.6)])
def test_padding_has_no_gradient_and_gets_into_none(double, k, factor):
    valid = some_valid()
    value, gradients = value_and_gradients(double, valid, k, factor)
    np.testing.assert_array_equal(gradients["x"][~valid], 0)
    assert np.all(np.any(gradients["x"][valid] != 0, axis=-1))
    spoilt = double | {"x": np.where(valid[..., None], double["x"], np.nan)}
    jax.tree.map(np.testing.assert_array_equal, value_and_gradients(spoilt, valid, k, factor), (value, gradients))
    for zero in jax.tree.leaves(value_and_gradients(spoilt, np.zeros((B, T), bool), k, factor)):
        np.testing.assert_array_equal(zero, 0)


@pytest.mark.parametrize("k", [1, 2])
def test_the_balance_loss_of_an_even_router_is_one_for_each_token(k):
    p, valid = parameters() | {"router": np.zeros((D, E), np.float32)}, some_valid()
    _, balance = mixture(tokens(), **p, num_chosen=k, capacity_factor=0.6, valid=valid)
    assert balance.loss == balance.weight == valid.sum() == 28
    np.testing.assert_allclose(balance.z_loss, 28 * math.log(E) ** 2, rtol=1e-6)


def test_the_balance_loss_of_one_expert_for_all_is_the_number_of_experts():
    x = np.zeros((B, T, D), np.float32)
    x[:2, :, 3] = x[2:, :, 0] = 100
    _, balance = mixture(x, **constants(), num_chosen=1, capacity_factor=0.6, valid=some_valid())
    assert balance.weight == 28
    assert balance.loss == E * 28  # row by row: that other rows go elsewhere makes it no better
    assert balance.dropped == (7 - 2) + (6 - 1) + (6 - 1) + 0 + (9 - 2)  # ceil(0.6 * tokens / 4) find room
    np.testing.assert_allclose(balance.z_loss, 28 * 100.0**2, rtol=1e-6)


@pytest.mark.parametrize("factor", [None, 0.6])
def test_low_precision_is_close_and_chooses_alike(factor):
    p, x, valid = parameters(), jnp.asarray(tokens(), jnp.bfloat16), some_valid()
    run = partial(mixture, **p, num_chosen=2, capacity_factor=factor, valid=valid)
    y, balance = run(x)
    exact, exact_balance = run(x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16 and all(part.dtype == jnp.float32 for part in jax.tree.leaves(balance))
    np.testing.assert_allclose(y.astype(np.float32), exact, rtol=0.03, atol=0.03 * np.std(exact))
    assert_same((y, balance), (y, exact_balance))


def test_the_router_computes_in_float32():
    router = np.full((D, E), 0.25, np.float32)
    router[0, 2:] += 1e-3  # in bfloat16 all logits would be 1, and the first two experts chosen
    x, valid = jnp.ones((B, T, D), jnp.bfloat16), np.ones((B, T), bool)
    y, balance = mixture(x, **constants(router), num_chosen=2, capacity_factor=None, valid=valid)
    np.testing.assert_array_equal(y, (3 + 4) / 2)
    expected = np.log(np.exp([1.0, 1.0, 1.001, 1.001]).sum()) ** 2
    np.testing.assert_allclose(balance.z_loss / balance.weight, expected, rtol=1e-6)


def test_a_vmap_is_a_loop():
    p, x, valid = parameters(), np.stack([tokens(), tokens()[::-1] * 2]), some_valid()
    run = partial(mixture, **p, num_chosen=2, capacity_factor=0.6, valid=valid)
    y, balance = jax.vmap(run)(x)
    for number in range(2):
        one = y[number], jax.tree.map(lambda part, n=number: part[n], balance)
        assert_same(one, run(x[number]), 1e-6)


def test_experts_on_devices_of_their_own_give_the_same():
    p, x, valid = parameters(), tokens(), some_valid()
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def placed(array, axis=None):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(axis)))

    sharded = {name: placed(array, None if name == "router" else "expert") for name, array in p.items()}
    options = {"num_chosen": 2, "capacity_factor": 0.6}
    compiled = mixture.lower(placed(x), **sharded, valid=placed(valid), **options).compile()
    assert_same(compiled(placed(x), **sharded, valid=placed(valid)), mixture(x, **p, valid=valid, **options), 1e-6)
    assert f"f32[{E},{D},{HIDDEN}]" not in compiled.as_text()  # no device ever holds the weights of all experts


@pytest.mark.parametrize("factor", [None, 1.0])
def test_every_row_and_every_expert_has_noise_of_its_own(factor):
    """Two experts that pass on what they get, mixed in equal parts: each gives 0 or 2."""
    size, rows = 256, 3
    router, weight = np.zeros((size, 2), np.float32), np.stack([np.eye(size, dtype=np.float32)] * 2)
    keys = jax.random.split(jax.random.key(0), rows)

    def noise(length, keys):
        x, valid = np.ones((rows, length, size), np.float32), np.tile(np.arange(length) < 4, (rows, 1))
        run = partial(mixture, num_chosen=2, capacity_factor=factor, dropout_rate=0.5)
        return np.asarray(run(x, router, weight, weight, valid=valid, dropout_key=keys)[0])[:, :4]

    y = noise(6, keys)
    np.testing.assert_allclose([np.mean(y == value) for value in (0, 1, 2)], [0.25, 0.5, 0.25], atol=0.05)
    np.testing.assert_allclose([np.mean(y[0] == y[1]), np.mean(y[:, 0] == y[:, 1])], 0.375, atol=0.08)
    np.testing.assert_array_equal(noise(6, keys[np.array([2, 0, 1])]), y[[2, 0, 1]])
    if factor is not None:
        np.testing.assert_array_equal(noise(4, keys), y)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_chosen": 0}, ValueError, "num_chosen must be from 1 to the number of experts, 4; got 0"),
        ({"num_chosen": 5}, ValueError, "num_chosen must be from 1 to the number of experts, 4; got 5"),
        ({"capacity_factor": 0.0}, ValueError, "capacity_factor must be above 0 and finite, or None .*; got 0.0"),
        ({"capacity_factor": math.inf}, ValueError, "capacity_factor must be above 0 and finite"),
        ({"capacity_factor": math.nan}, ValueError, "capacity_factor must be above 0 and finite"),
        ({"router": np.ones((D, 2), np.float32)}, ValueError, "the router has 2 experts but weight_in has 4"),
        ({"valid": np.ones((B, T), np.int32)}, TypeError, "valid must be boolean, True at tokens; got int32"),
        ({"valid": np.ones((T, B), bool)}, ValueError, r"valid has shape \(9, 5\) but x has .* \(5, 9\)"),
        ({"activation": "swish"}, ValueError, "activation='swish' is unknown"),
    ],
)
def test_what_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        mixture(tokens(), **{**parameters(), "num_chosen": 1, "capacity_factor": 1.0} | change)
