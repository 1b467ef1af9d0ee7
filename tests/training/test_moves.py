"""A state that was saved on some devices, and restored on others."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.parallel import MeshConfig, Strategy
from transformer_jax.training import OptimizerConfig, TrainState, load_arrays
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.saved import SavedArrays

ROOT = Path(__file__).parent.parent.parent


def create():
    return TrainState.create(tiny.make(), OptimizerConfig(clip_norm=1.0).build(16), jax.random.key(5))


def known_state():
    """A state of which every number is another one, on one device."""

    def fill(path, leaf):
        random = np.random.default_rng(list(jax.tree_util.keystr(path).encode()))
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(77)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.full(leaf.shape, 7, leaf.dtype)
        return jnp.asarray(random.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(create))


def plain(tree):
    """Every array as NumPy, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    is_key = {name: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for name, x in arrays.items()}
    return {name: np.asarray(jax.random.key_data(x) if is_key[name] else x) for name, x in arrays.items()}


def assert_bitwise_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


def strategy(name, count=None, **mesh):
    return Strategy.choose(name, MeshConfig(**mesh), devices=jax.devices()[:count])


SAVED_ON = {"pmap": ("pmap", {}), "data=8": ("jit", {}), "fsdp=4 tensor=2": ("jit", {"fsdp": 4, "tensor": 2})}
RESTORED_ON = {
    "one device": ("jit", {"count": 1}),
    "two devices": ("jit", {"count": 2}),
    "fsdp=4 of four": ("jit", {"count": 4, "fsdp": 4}),
    "data=2 fsdp=2 tensor=2": ("jit", {"fsdp": 2, "tensor": 2}),
    "pmap of four": ("pmap", {"count": 4}),
    "pmap": ("pmap", {}),
}


@pytest.fixture(scope="module")
def known():
    return known_state()


@pytest.fixture(scope="module", params=SAVED_ON)
def saved(request, known, tmp_path_factory):
    name, mesh = SAVED_ON[request.param]
    state = jax.device_put(known, strategy(name, **mesh).shardings(known))
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(folder)
    checkpoints.save(state)
    checkpoints.close()
    return folder


@pytest.mark.parametrize("where", RESTORED_ON)
def test_a_state_is_the_same_on_other_devices(saved, known, where):
    name, mesh = RESTORED_ON[where]
    like = jax.eval_shape(create)
    shardings = strategy(name, **mesh).shardings(like)
    restored = Checkpoints(saved, read_only=True).restore(like, shardings=shardings)
    assert_bitwise_equal(plain(restored), plain(known))
    assert [x.sharding for x in jax.tree.leaves(restored)] == jax.tree.leaves(shardings)


def test_parameters_are_read_as_numpy(saved, known):
    expected = {name.strip(".").removesuffix(".value"): x for name, x in plain(known.model).items()}
    found = load_arrays(saved.parent)
    assert all(type(array) is np.ndarray for array in found.values())
    assert_bitwise_equal(dict(sorted(found.items())), dict(sorted(expected.items())))
    lazy = SavedArrays(saved, 7)
    assert {name: (lazy.abstract(name).shape, lazy.abstract(name).dtype) for name in lazy} == {
        name: (array.shape, array.dtype) for name, array in expected.items()
    }


def test_parameters_are_read_without_a_device(tmp_path):
    model = {"a": {"weight": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}, "b": jnp.float32(0.5)}
    folder = tmp_path / "100% ours"
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save_model(model, 4)
    checkpoints.close()
    program = (
        "import sys; from transformer_jax.training import load_arrays; "
        "print({name: (str(x.dtype), x.tolist()) for name, x in load_arrays(sys.argv[1]).items()})"
    )
    environment = os.environ | {"JAX_PLATFORMS": "none_that_exists"}
    done = subprocess.run([sys.executable, "-c", program, folder], env=environment, capture_output=True, text=True)
    assert done.stdout == "{'a.weight': ('bfloat16', [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), 'b': ('float32', 0.5)}\n"


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save_model({"w": jnp.arange(4096.0)}, 4)
    checkpoints.close()
    arrays = SavedArrays(tmp_path)
    for path in (tmp_path / "checkpoints" / "4" / "model").rglob("d/*"):
        path.unlink()
    with pytest.raises(UserError, match=r"checkpoints/4/model is damaged: "):
        arrays["w"]
    for path in (tmp_path / "checkpoints" / "4" / "model").rglob("manifest.ocdbt"):
        path.unlink()
    with pytest.raises(UserError, match=r"checkpoints/4/model is damaged: it has no parameters"):
        load_arrays(tmp_path)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path, saved):
    with pytest.raises(UserError, match=r"has no checkpoint of step 9; there are: 7"):
        load_arrays(saved, 9)
    with pytest.raises(UserError, match=r"has no checkpoint; there are: none"):
        load_arrays(tmp_path)


PROGRAM = """
import sys
import jax

index, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, heartbeat_timeout_seconds=10)

from dataclasses import replace
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from tests.training.test_moves import create, known_state, strategy
from transformer_jax.training.checkpoints import Checkpoints

def refuse(*arguments, **settings):
    raise AssertionError("a save must not come between the collectives of a step")

for name in ("sync_global_devices", "broadcast_one_to_all", "process_allgather"):
    setattr(multihost_utils, name, refuse)

like = jax.eval_shape(create)
four = strategy("jit", fsdp=4)
known = four.initialize(known_state)
checkpoints = Checkpoints(Path(folder, "of_two"), keep=2)
step = four.jit(lambda x: x.mean())
x = four.place({"x": np.arange(4.0, dtype=np.float32)[4 // 2 * index :][:2]})["x"]
for number in (5, 6, 7):
    checkpoints.save(replace(known, step=known.step - 7 + number))
    for _ in range(20):  # collectives, while the save goes on
        assert float(step(x)) == 1.5
checkpoints.close()

restored = Checkpoints(Path(folder, "of_one"), read_only=True).restore(like, shardings=four.shardings(like))
for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(known), strict=True):
    data = (lambda x: x) if jnp.issubdtype(a.dtype, jnp.number) else jax.random.key_data
    pairs = zip(data(a).addressable_shards, data(b).addressable_shards, strict=True)
    assert all(np.asarray(mine.data).tobytes() == np.asarray(other.data).tobytes() for mine, other in pairs)
print("equal", len(jax.tree.leaves(restored)), flush=True)
"""


def test_a_state_moves_between_two_processes_and_one(tmp_path, known):
    one = Checkpoints(tmp_path / "of_one")
    one.save(jax.device_put(known, strategy("jit", 4, fsdp=4).shardings(known)))
    one.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(index), port, tmp_path],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0 and out.endswith(f"equal {len(jax.tree.leaves(known))}\n"), out + err
    finally:
        for process in processes:
            process.kill()
    checkpoints, like = Checkpoints(tmp_path / "of_two", read_only=True), jax.eval_shape(create)
    assert checkpoints.steps() == [6, 7]
    for count in (1, 4):
        shardings = strategy("jit", count, fsdp=count).shardings(like)
        assert_bitwise_equal(plain(checkpoints.restore(like, shardings=shardings)), plain(known))
    names = {path.name for path in (tmp_path / "of_two" / "7" / "model").iterdir()}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= names  # each has written its own shards
