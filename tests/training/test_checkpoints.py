import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import BestCheckpoint
from transformer_jax.training import OptimizerConfig, TrainState
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.saved import saved_steps

ROOT = Path(__file__).parent.parent.parent


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
    checkpoints.save(Strategy.choose("pmap").replicate(at(state, 1)))
    restored = checkpoints.restore(jax.eval_shape(create))
    for a, b in zip(jax.tree.leaves(restored.model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert len(a.devices()) == 1


def test_the_newest_and_the_best_are_kept(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step, loss in enumerate([0.9, 0.2, 0.5, None, 0.4, None], 1):
        checkpoints.save(at(state, step), None if loss is None else {"loss": loss, "exact_match": 0.0})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    checkpoints.close()


@pytest.mark.parametrize(("direction", "best"), [("highest", 1), ("lowest", 3)])
def test_the_best_is_by_the_tasks_own_metric_and_direction(tmp_path, state, direction, best):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=BestCheckpoint("f1", direction))
    for step, (f1, loss) in enumerate([(0.8, 0.9), (0.5, 0.1), (0.2, 0.5), (0.4, 0.7)], 1):
        checkpoints.save(at(state, step), {"loss": loss, "f1": f1, "signature": "words"})
    checkpoints.wait()
    assert checkpoints.steps() == [best, 4]
    checkpoints.close()


def saved_without_training_state(folder, state):
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(at(state, 3))
    checkpoints.close()
    shutil.rmtree(folder / "checkpoints" / "3" / "training")
    return Checkpoints(folder / "checkpoints", read_only=True)


def test_parameters_are_read_without_the_training_state(tmp_path, state):
    checkpoints = saved_without_training_state(tmp_path, state)
    model = checkpoints.restore_model(jax.eval_shape(tiny.make))
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype and len(a.devices()) == 1
    assert jax.tree.structure(model) == jax.tree.structure(state.model)
    advice = (
        rf"{tmp_path} has parameters and no training state, .*; start a new run from it with --init-from {tmp_path}"
    )
    with pytest.raises(UserError, match=advice):
        checkpoints.restore(jax.eval_shape(create))


def test_parameters_come_in_the_type_and_on_the_devices_that_are_asked_for(tmp_path, state):
    checkpoints = saved_without_training_state(tmp_path, state)
    sharding, like = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec()), jax.eval_shape(tiny.make)
    shardings = jax.tree.map(lambda _: sharding, like)
    model = checkpoints.restore_model(like, dtype=jnp.bfloat16, shardings=shardings)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(state.model), strict=True):
        assert a.dtype == jnp.bfloat16 and a.sharding == sharding and len(a.devices()) == 8
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def test_a_model_alone_can_be_saved(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save_model(state.model, 7)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert again.steps() == [7]
    for a, b in zip(
        jax.tree.leaves(again.restore_model(jax.eval_shape(tiny.make))), jax.tree.leaves(state.model), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_of_another_model_is_named(tmp_path, state):
    checkpoints = saved_without_training_state(tmp_path, state)
    other = jax.eval_shape(lambda: tiny.make(replace(tiny.CONFIG, positions="learned")))
    with pytest.raises(UserError, match=r"checkpoint 3 of .* is of another model"):
        checkpoints.restore_model(other)


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


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=BestCheckpoint("f1", "highest"))
    for step, value in enumerate([0.5, float("nan"), 0.4, 0.3], 1):
        checkpoints.save(at(state, step), {"f1": value})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4]
    checkpoints.close()


def test_an_evaluation_that_was_cut_short_still_marks_its_checkpoint(tmp_path, state):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=BestCheckpoint("f1", "highest"))
    checkpoints.save(at(state, 1))
    checkpoints.save(at(state, 1), {"f1": 0.9})
    for step in (2, 3):
        checkpoints.save(at(state, step), {"f1": 0.1})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()


def test_the_best_is_still_known_when_a_run_goes_on(tmp_path, state):
    best, evaluated = BestCheckpoint("f1", "highest"), {1: {"f1": 0.9}, 2: {"f1": 0.1}}
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=best)
    for step, metrics in evaluated.items():
        checkpoints.save(at(state, step), metrics)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=1, best=best, evaluated=evaluated)
    again.save(at(state, 3), {"f1": 0.2})
    again.wait()
    assert again.steps() == [1, 3]
    again.close()


def test_what_is_neither_new_nor_the_best_is_surplus(tmp_path, state):
    directory, evaluated = tmp_path / "checkpoints", {1: {"loss": 0.3}, 2: {"loss": 0.1}, 3: {"loss": 0.2}}
    checkpoints = Checkpoints(directory, keep=9)
    for step in range(1, 6):
        checkpoints.save_model(state.model, step)
    checkpoints.close()
    again = Checkpoints(directory, keep=2, evaluated=evaluated)
    assert again.surplus() == [1, 3]
    again.delete(3)
    assert again.steps() == saved_steps(directory) == [1, 2, 4, 5]
    with pytest.raises(UserError, match="has no checkpoint of step 3; there are: 1, 2, 4, 5"):
        again.delete(3)
    again.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux")
def test_a_save_takes_at_most_half_of_the_state_in_memory_besides_it():
    program = "from benchmarks.save_memory import measure; print(measure(300, 6)[0])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5
