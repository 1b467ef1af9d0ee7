"""Training and evaluation on several devices, in whatever order these are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from transformer_jax.parallel import Strategy
from transformer_jax.training import TrainState, make_train_step


def squares(model, batch, keys):
    return jnp.sum((model["w"] * batch["x"]) ** 2), jnp.float32(batch["x"].size)


@pytest.fixture
def reordered(monkeypatch):
    """As on a TPU host, where a mesh is laid out along the rings of its chips and not by their numbers."""

    def along_the_rings(shape, axis_names, *, axis_types, devices=None):
        devices = jax.devices() if devices is None else devices
        return Mesh(np.array(devices[::-1]).reshape(shape), axis_names, axis_types=axis_types)

    monkeypatch.setattr(jax, "make_mesh", along_the_rings)


@pytest.mark.parametrize("order", [range(8), [3, 1, 0, 2, 6, 7, 5, 4]])
def test_what_pmap_trained_is_evaluated_on_batches_in_the_same_order(reordered, monkeypatch, order):
    devices = [jax.devices()[number] for number in order]
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: devices)
    strategy = Strategy(8, "data")
    state = TrainState.create({"w": jnp.float32(2)}, optax.sgd(0.1), jax.random.key(0))
    batch = {"x": np.arange(16, dtype=np.float32), "slot": np.arange(16, dtype=np.int32)}
    step = strategy.compile(make_train_step(squares, optax.sgd(0.1), axis_name="data"))
    state, _ = step(strategy.replicate(state), batch)

    @jax.jit
    def evaluate(model, batch):
        return model["w"] * batch["x"]

    placed = strategy.place(batch)
    expected = 2 - 0.1 * 2 * 2 * np.mean(batch["x"] ** 2)
    np.testing.assert_allclose(evaluate(state.model, placed), expected * batch["x"], rtol=1e-5)
    first_rows = {shard.device: int(shard.data[0]) for shard in placed["slot"].addressable_shards}
    assert [first_rows[device] for device in devices] == list(range(0, 16, 2))
