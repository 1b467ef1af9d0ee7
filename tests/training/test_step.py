"""One step, however the batch is divided: over devices, over micro-batches, with ragged padding and dropout on."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from transformer_jax.data import Batches, BatchingConfig, Rows, Store
from transformer_jax.data.columns import token_column
from transformer_jax.functional import cross_entropy
from transformer_jax.parallel import MeshConfig, Strategy
from transformer_jax.tasks import LossTerm
from transformer_jax.training import OptimizerConfig, TrainState, make_train_step

CONFIG = replace(tiny.CONFIG, dropout_rate=0.2, attention_dropout_rate=0.1, activation_dropout_rate=0.1)
STILL = replace(CONFIG, dropout_rate=0.0, attention_dropout_rate=0.0, activation_dropout_rate=0.0)
ROWS = 8


def loss(model, batch, key):
    logits = model(batch["source"], batch["target"][:, :-1], dropout_key=key)
    labels = batch["target"][:, 1:]
    return cross_entropy(logits, labels, labels != tiny.PAD, label_smoothing=0.1)


def batch_of(rows=ROWS):
    source, target = tiny.pairs(rows=rows, source_length=7, target_length=9)
    return {"source": np.asarray(source), "target": np.asarray(target), "slot": np.arange(rows, dtype=np.int32)}


def start(optimizer, config=CONFIG):
    return jax.jit(lambda: TrainState.create(tiny.make(config), optimizer, jax.random.key(7)))()


def strategy_of(devices):
    """So many devices under pmap, or a mesh."""
    if isinstance(devices, int):
        return Strategy.pmap(jax.devices()[:devices]) if devices > 1 else Strategy.choose(devices=jax.devices()[:1])
    return Strategy.choose("jit", MeshConfig(**devices), devices=jax.devices()[: prod(devices.values())])


def run(optimizer, batch, *, devices=1, accumulate=1, steps=1, config=CONFIG, loss=loss):
    state = start(optimizer, config)
    strategy = strategy_of(devices)
    state = jax.device_put(state, strategy.shardings(state))
    step = strategy.compile(
        make_train_step(loss, optimizer, accumulate=accumulate, axis_name=strategy.axis_name), state
    )
    batch = next(strategy.feed(iter([batch])))
    history = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        history.append(jax.tree.map(float, metrics))
    return jax.tree.map(np.asarray, replace(state, key=jax.random.key_data(state.key))), history


@pytest.fixture(scope="module")
def whole():
    return run(optax.sgd(1.0), batch_of())


MESHES = [
    ({"data": 8}, 1),
    ({"data": 2}, 4),
    ({"fsdp": 4, "data": 1}, 2),
    ({"data": 2, "tensor": 2}, 1),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 1),
    ({"data": 2, "sequence": 4}, 1),
    ({"data": 1, "sequence": 2, "tensor": 2}, 2),
]


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 4), (2, 2), (4, 1), (8, 1), *MESHES])
def test_loss_and_gradients_do_not_depend_on_the_division(whole, devices, accumulate):
    state, history = run(optax.sgd(1.0), batch_of(), devices=devices, accumulate=accumulate)
    assert history[0]["loss"] == pytest.approx(whole[1][0]["loss"], rel=1e-5)
    assert history[0]["weight"] == whole[1][0]["weight"]
    assert history[0]["gradient_norm"] == pytest.approx(whole[1][0]["gradient_norm"], rel=1e-4)
    for part, full in zip(jax.tree.leaves(state.model), jax.tree.leaves(whole[0].model), strict=True):
        np.testing.assert_allclose(part, full, rtol=1e-4, atol=2e-6)


ROW_FACTOR = 2.0


def two_losses(model, batch, key):
    """The loss of the tokens, of which rows have different numbers; of the rows; and one that is only watched."""
    logits = model(batch["source"], batch["target"][:, :-1], dropout_key=key)
    labels = batch["target"][:, 1:]
    is_row = batch["target"][:, 0] != tiny.PAD
    first = cross_entropy(logits[:, 0], batch["target"][:, 1], is_row)
    return {
        "tokens": LossTerm(*cross_entropy(logits, labels, labels != tiny.PAD)),
        "rows": LossTerm(*first, ROW_FACTOR),
        "watched": LossTerm(jnp.sum(logits[:, 0, 0] ** 2 * is_row), jnp.sum(is_row), 0.0),
    }


@pytest.fixture(scope="module")
def named():
    """The means by hand, and one step of gradient descent on them."""
    batch, model = batch_of(), tiny.make(STILL)

    def means(model):
        terms = two_losses(model, batch, None)
        found = {name: term.total / term.weight for name, term in terms.items()}
        return found["tokens"] + ROW_FACTOR * found["rows"], found

    (value, found), gradients = jax.jit(jax.value_and_grad(means, has_aux=True))(model)
    return {"loss": value, **found}, jax.tree.map(lambda x, g: x - g, model, gradients)


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (1, 4), (2, 2), (8, 1)])
def test_each_term_is_divided_by_its_own_weight_once(named, devices, accumulate):
    state, history = run(
        optax.sgd(1.0), batch_of(), devices=devices, accumulate=accumulate, config=STILL, loss=two_losses
    )
    means, expected = named
    for name, value in means.items():
        assert history[0][name] == pytest.approx(float(value), rel=1e-5)
    for part, full in zip(jax.tree.leaves(state.model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(part, full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_weight_is_that_of_the_first_term(named, accumulate):
    _, history = run(optax.sgd(1.0), batch_of(), config=STILL, loss=two_losses, accumulate=accumulate)
    assert history[0]["weight"] == float((batch_of()["target"][:, 1:] != tiny.PAD).sum()) > ROWS


def test_a_mean_of_means_would_differ(whole):
    """The batch is ragged enough for the wrong division to show."""
    batch = batch_of()
    halves = [jax.tree.map(lambda x, h=half: x[h], batch) for half in (slice(0, 4), slice(4, 8))]
    means = [run(optax.sgd(1.0), half)[1][0]["loss"] for half in halves]
    assert abs(np.mean(means) - whole[1][0]["loss"]) > 1e-3


def test_the_gradient_is_that_of_the_mean_over_tokens():
    batch = batch_of()
    state, history = run(optax.sgd(1.0), batch, config=STILL)
    model = tiny.make(STILL)

    def mean(model):
        total, weight = loss(model, batch, None)
        return total / weight

    value, gradients = jax.jit(jax.value_and_grad(mean))(model)
    assert history[0]["loss"] == pytest.approx(float(value), rel=1e-5)
    for before, gradient, after in zip(*map(jax.tree.leaves, (model, gradients, state.model)), strict=True):
        np.testing.assert_allclose(before - gradient, after, atol=1e-5)


def test_devices_with_nothing_but_padding_do_no_harm():
    batch = batch_of()
    padded = {name: np.concatenate([x, np.full_like(x, tiny.PAD)]) for name, x in batch.items()}
    padded["slot"] = np.arange(2 * ROWS, dtype=np.int32)
    state, history = run(optax.sgd(1.0), padded, devices=8)
    alone, expected = run(optax.sgd(1.0), batch)
    assert history[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
    for part, full in zip(jax.tree.leaves(state.model), jax.tree.leaves(alone.model), strict=True):
        np.testing.assert_allclose(part, full, rtol=1e-4, atol=2e-6)


def test_a_batch_of_nothing_but_padding_changes_nothing():
    nothing = {name: np.full_like(x, tiny.PAD) for name, x in batch_of().items()}
    state, history = run(optax.sgd(1.0), nothing)
    assert history[0] == {"loss": 0.0, "weight": 0.0, "gradient_norm": 0.0}
    for before, after in zip(jax.tree.leaves(tiny.make(CONFIG)), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(before, after)


def test_dropout_differs_from_step_to_step_and_from_row_to_row():
    batch = batch_of()
    same_rows = {name: np.repeat(x[:1], ROWS, axis=0) for name, x in batch.items()} | {"slot": batch["slot"]}
    _, history = run(optax.sgd(0.0), same_rows, steps=2)
    assert history[0]["loss"] != history[1]["loss"]
    model = tiny.make(CONFIG)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(7), jnp.arange(ROWS))
    logits = jax.jit(type(model).__call__)(model, same_rows["source"], same_rows["target"], dropout_key=keys)
    assert len({float(row[0, 0]) for row in logits}) == ROWS


def test_accumulation_does_not_advance_the_schedule():
    optimizer = OptimizerConfig(warmup_steps=4).build(16)
    _, once = run(optimizer, batch_of(), steps=3)
    state, four = run(optimizer, batch_of(), steps=3, accumulate=4)
    assert state.step == 3
    assert [int(count) for count in jax.tree.leaves(state.optimizer) if count.dtype == np.int32] == [3, 3]
    np.testing.assert_allclose([m["loss"] for m in four], [m["loss"] for m in once], rtol=1e-4)


def test_the_update_is_adam_with_decay_and_clipping():
    config = OptimizerConfig(warmup_steps=1, weight_decay=0.1, clip_norm=0.5, scale=0.1)
    optimizer = config.build(16)
    gradients = jax.tree.map(jnp.ones_like, tiny.make())
    model = tiny.make()
    updates, _ = jax.jit(lambda g, m: optimizer.update(g, optimizer.init(m), m))(gradients, model)
    rate = 0.1 * 16**-0.5
    # Adam's first update is the sign of the gradient, however it was clipped.
    table, bias = updates.embedding.table[...], updates.encoder.blocks.feed_forward.input.bias[...]
    np.testing.assert_allclose(bias, -rate, rtol=1e-4)
    np.testing.assert_allclose(table, -rate * (1 + 0.1 * model.embedding.table[...]), rtol=1e-4)


def test_clipping_bounds_the_global_norm():
    optimizer = OptimizerConfig(clip_norm=0.5).build(16)
    gradients = {"a": jnp.full((3,), 10.0), "b": jnp.full((4,), -10.0)}
    state = optimizer.init(gradients)
    _, after = optimizer.update(gradients, state, gradients)
    first_moment = after[1].mu
    assert float(optax.global_norm(first_moment)) == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_an_epoch_of_ragged_data_compiles_once_per_bucket():
    random, ids = np.random.default_rng(0), token_column(tiny.VOCAB, tiny.PAD)
    examples = [{"source": [4] * random.integers(1, 30), "target": [5] * random.integers(1, 30)} for _ in range(60)]
    batches = Batches(Rows(Store.of(examples, {"source": ids, "target": ids}), BatchingConfig(64, num_buckets=3)))

    def size(model, batch, key):
        return jnp.sum(model.embedding(batch["source"])), jnp.sum(batch["target"] != tiny.PAD)

    strategy = strategy_of(1)
    state = strategy.replicate(start(optax.sgd(0.1)))
    step = strategy.compile(make_train_step(size, optax.sgd(0.1)), state)
    for number in range(batches.per_epoch):
        state, _ = step(state, batches[number])
    assert batches.per_epoch > 3
    assert len(step.programs) == 3


@pytest.mark.parametrize("name", ["weight", "gradient_norm"])
def test_a_term_cannot_have_the_name_of_a_metric_of_every_step(name):
    step = make_train_step(lambda model, batch, key: {name: (jnp.float32(1), jnp.float32(1))}, optax.sgd(1.0))
    with pytest.raises(ValueError, match=f"called '{name}'"):
        jax.eval_shape(step, start(optax.sgd(1.0)), batch_of())


def test_a_loss_that_is_a_number_says_what_a_loss_is():
    step = make_train_step(lambda model, batch, key: jnp.float32(1), optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"a loss is a tuple \(sum, weight\)"):
        jax.eval_shape(step, start(optax.sgd(1.0)), batch_of())


def test_without_slots_no_two_rows_of_any_device_share_a_key():
    """And they are the keys of the same rows on one device."""

    def noise(model, batch, key):
        drawn = jax.vmap(lambda k: jax.random.normal(k, (2,)))(key)
        return jnp.sum(drawn) + 0 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(model)), jnp.float32(len(drawn))

    batch = {name: value for name, value in batch_of().items() if name != "slot"}
    losses = [run(optax.sgd(1.0), batch, devices=devices, loss=noise)[1][0]["loss"] for devices in (1, 8)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
