"""Training and evaluation on several devices, in whatever order these are."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig, XLNetConfig
from transformer_jax.parallel import MeshConfig, Rules, Strategy
from transformer_jax.training import OptimizerConfig, TrainState, make_train_step

ORDERS = [range(8), [3, 1, 0, 2, 6, 7, 5, 4]]


def squares(model, batch, keys):
    return jnp.sum((model["w"] * batch["x"]) ** 2), jnp.float32(batch["x"].size)


@pytest.fixture
def reordered(monkeypatch):
    """As on a TPU host, where a mesh is laid out along the rings of its chips and not by their numbers."""

    def along_the_rings(shape, devices, **settings):
        return np.array(devices[::-1]).reshape(shape)

    monkeypatch.setattr(mesh_utils, "create_device_mesh", along_the_rings)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", ["pmap", "jit"])
def test_what_was_trained_is_evaluated_on_batches_in_the_same_order(reordered, monkeypatch, order, strategy):
    devices = [jax.devices()[number] for number in order]
    monkeypatch.setattr(jax, "devices", lambda *_, **__: devices)
    strategy = Strategy.choose(strategy)
    state = strategy.initialize(lambda: TrainState.create({"w": jnp.float32(2)}, optax.sgd(0.1), jax.random.key(0)))
    batch = {"x": np.arange(16, dtype=np.float32), "slot": np.arange(16, dtype=np.int32)}
    step = strategy.compile(make_train_step(squares, optax.sgd(0.1), axis_name=strategy.axis_name), state)
    state, _ = step(state, next(strategy.feed(iter([batch]))))

    evaluate = strategy.jit(lambda model, batch: model["w"] * batch["x"], out_shardings=strategy.replicated)
    placed = strategy.place(batch)
    expected = 2 - 0.1 * 2 * 2 * np.mean(batch["x"] ** 2)
    np.testing.assert_allclose(evaluate(state.model, placed), expected * batch["x"], rtol=1e-5)
    first_rows = {shard.device: int(shard.data[0]) for shard in placed["slot"].addressable_shards}
    assert [first_rows[device] for device in strategy.devices] == list(range(0, 16, 2))
    assert strategy.devices == (devices if strategy.axis_name else devices[::-1])


@pytest.mark.parametrize(
    ("mesh", "count", "message"),
    [
        ({"fsdp": 3}, 8, "the mesh fsdp=3 does not divide 8 devices"),
        ({"data": 4, "tensor": 4}, 8, "the mesh data=4 [*] tensor=4 has 16 devices, but there are 8"),
        ({"tensor": 0}, 8, "mesh.tensor must be at least 1; got 0"),
        ({"data": 1, "slices": 2}, 1, "mesh.slices=2, but the devices are of 1 slices"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_an_error(mesh, count, message):
    with pytest.raises(UserError, match=message):
        Strategy.choose("jit", MeshConfig(**mesh), devices=jax.devices()[:count])


def test_fewer_devices_are_used_only_where_all_axes_say_so():
    assert Strategy.choose("jit", MeshConfig(data=2, tensor=2)).devices == jax.devices()[:4]
    assert Strategy.choose("jit", MeshConfig(tensor=2)).mesh.size == 8


def test_pmap_has_all_weights_everywhere():
    with pytest.raises(UserError, match=r"strategy=pmap .* mesh.fsdp=2 shards them; set strategy to jit"):
        Strategy.choose("pmap", MeshConfig(fsdp=2))


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("config", [TransformerConfig, GPTConfig, BertConfig, T5Config, XLNetConfig])
def test_with_fsdp_a_device_has_its_share_of_the_parameters_and_of_the_optimizer(config, count):
    sizes = config.small() if config is GPTConfig else config.base()
    optimizer = OptimizerConfig().build(sizes.d_model)
    state = jax.eval_shape(lambda: TrainState.create(sizes.build(nnx.Rngs(0)), optimizer, jax.random.key(0)))
    shardings = Strategy.choose("jit", MeshConfig(fsdp=count, data=1)).shardings(state)
    for name in ("model", "optimizer"):
        leaves = jax.tree.leaves(getattr(state, name))
        whole = sum(leaf.size for leaf in leaves)
        where = jax.tree.leaves(getattr(shardings, name))
        here = sum(prod(one.shard_shape(leaf.shape)) for one, leaf in zip(where, leaves, strict=True))
        assert here * count == pytest.approx(whole, rel=0.1)


def test_what_is_initialized_in_shards_is_what_is_initialized_whole():
    strategy = Strategy.choose("jit", MeshConfig(fsdp=2, tensor=2))
    model = strategy.initialize(tiny.make)
    for shard, whole in zip(jax.tree.leaves(model), jax.tree.leaves(tiny.make()), strict=True):
        np.testing.assert_array_equal(shard, whole)


def test_rules_say_what_is_sharded():
    weight = Strategy.choose("jit", MeshConfig(tensor=2), Rules(heads=(), ff=("tensor",)))
    model = weight.initialize(tiny.make)
    blocks = model.encoder.blocks
    assert blocks.self_attention.query.weight.get_value().sharding.is_fully_replicated
    assert blocks.feed_forward.input.weight.get_value().sharding.spec == PartitionSpec(None, "fsdp", "tensor")


def test_rules_name_axes_of_the_mesh():
    with pytest.raises(UserError, match=r"rules.heads has 'model'; choose among data, fsdp"):
        Rules(heads=("model",))
    with pytest.raises(UserError, match=r"rules.batch=.* names a mesh axis twice"):
        Rules(batch=("data", "data"))
