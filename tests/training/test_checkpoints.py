import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy
from transformer_jax.training import OptimizerConfig, TrainState
from transformer_jax.training.checkpoints import Checkpoints


def create():
    return TrainState.create(tiny.make(), OptimizerConfig().build(16), jax.random.key(5))


def at(state, step):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.int32(step) if jax.tree_util.keystr(path) == ".step" else x, state
    )


@pytest.fixture(scope="module")
def state():
    return create()


def test_what_is_restored_is_what_was_saved(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(at(state, 3))
    checkpoints.wait()
    restored = Checkpoints(tmp_path / "checkpoints").restore(jax.eval_shape(create))
    assert int(restored.step) == 3
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist()
    for a, b in zip(jax.tree.leaves(restored.model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_a_state_of_eight_devices_is_restored_on_one(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(Strategy(8, "data").replicate(at(state, 1)))
    restored = checkpoints.restore(jax.eval_shape(create))
    for a, b in zip(jax.tree.leaves(restored.model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert len(a.devices()) == 1


def test_the_newest_and_the_best_are_kept(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step, figure in enumerate([0.9, 0.2, 0.5, None, 0.4, None], 1):
        checkpoints.save(at(state, step), None if figure is None else {"loss": figure, "exact_match": 0.0})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    checkpoints.close()


def test_a_save_that_was_cut_short_does_not_count(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(at(state, 1))
    checkpoints.close()
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "default").mkdir()
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.latest() == 1
    again.save(at(state, 2))
    again.close()
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).latest() == 2


def test_mistakes_are_named(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint of step 9; there are: none"):
        checkpoints.restore(jax.eval_shape(create), 9)
