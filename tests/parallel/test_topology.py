"""Devices of topologies that are not there, what a compiled program takes on each device, and the roofline."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.parallel.chips import find_chip
from transformer_jax.parallel.topology import ENVIRONMENT, MemoryUse, memory, roofline, tpu_devices

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")


@pytest.fixture(autouse=True)
def one_of_several_processes(monkeypatch):
    """The other tests may use libtpu at the same time, and no test keeps its environment."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ENVIRONMENT[name]))


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "kind", "count"),
    [
        ("v3:2x2", "TPU v3", 8),
        ("v4:2x2x1", "TPU v4", 4),
        ("v5e:1x1", "TPU v5 lite", 1),
        ("v5e:2x4", "TPU v5 lite", 8),
        ("v5p:2x2x2", "TPU v5", 8),
        ("v6e:4x4", "TPU v6 lite", 16),
        ("v7x:2x2x1", "TPU7x", 8),
    ],
)
def test_each_chip_is_as_many_devices_as_we_say(topology, kind, count):
    devices = tpu_devices(topology)
    num_chips = np.prod([int(side) for side in topology.split(":")[1].split("x")])
    assert {device.device_kind for device in devices} == {kind}
    assert len(devices) == count == num_chips * find_chip(kind).devices


@needs_libtpu
def test_several_slices():
    devices = tpu_devices("v5e:2x2", num_slices=3)
    assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4 + [2] * 4


@needs_libtpu
def test_what_does_not_fit_is_what_exceeds_the_memory_of_the_chip():
    """The output is as large as the argument, unless it takes its place."""
    mesh = Mesh(np.array(tpu_devices("v5e:2x2")), "data")
    chip = find_chip("v5e:2x2")

    def compiled(fraction, donated=()):
        rows = int(4 * chip.memory * fraction / (4 * 1024)) // 32 * 32  # of 1,024 floats, on four devices
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
        return jax.jit(lambda x: x * 2, donate_argnums=donated).lower(x).compile()

    assert memory(compiled(0.48)).peak == pytest.approx(2 * 0.48 * chip.memory, rel=1e-3)
    assert memory(compiled(0.9, donated=0)).peak == pytest.approx(0.9 * chip.memory, rel=1e-3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compiled(0.52)


@pytest.mark.parametrize("topology", ["v5e", "v9:2x2", "v5e:4", "v5e:4x4x4x4", "NVIDIA H100 80GB HBM3", "v5e:axb"])
def test_an_unknown_topology_is_an_error_that_shows_others(topology):
    with pytest.raises(UserError, match=r"is not known; give a chip \(v3, .*, tpu7x\) and a shape, such as v5e:4x4"):
        tpu_devices(topology)


@pytest.mark.parametrize("topology", ["v5e:32x32", "v6e:2x2x2"])
def test_a_slice_that_no_chip_has_is_an_error_before_the_compiler_aborts(topology):
    with pytest.raises(UserError, match="is at most 16x16; give a smaller one and num_slices"):
        tpu_devices(topology)


@needs_libtpu
def test_what_libtpu_refuses_is_said_in_its_own_words():
    with pytest.raises(UserError, match=r"'v5e:3x3' does not exist; give one such as v5e:4x4.* is not divisible"):
        tpu_devices("v5e:3x3")


def test_what_to_do_without_a_compiler_or_beside_another_process(monkeypatch):
    with pytest.raises(UserError, match="num_slices=0 must be at least 1"):
        tpu_devices("v5e:2x2", num_slices=0)
    monkeypatch.setattr("transformer_jax.parallel.topology.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "transformer_jax\[tpu\]"'):
        tpu_devices("v5e:2x2")

    def refuse(*args, **options):
        raise RuntimeError("ABORTED: Internal error when accessing libtpu multi-process lockfile.")

    monkeypatch.setattr("transformer_jax.parallel.topology.find_spec", lambda name: name)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(UserError, match=r"another process .* uses libtpu; wait .* ALLOW_MULTIPLE_LIBTPU_LOAD=1"):
        tpu_devices("v5e:2x2")


def test_only_what_the_environment_lacks_is_set(monkeypatch):
    monkeypatch.setattr("transformer_jax.parallel.topology.find_spec", lambda name: name)
    asked = {}

    def describe(name, platform, **options):
        asked.update(options, name=name, platform=platform)
        return SimpleNamespace(devices=[])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", describe)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-8")
    tpu_devices("V7X:2x2x1", num_slices=2)
    assert asked == {"name": "tpu7x:2x2x1", "platform": "tpu", "num_slices": 2}
    assert (os.environ["TPU_SKIP_MDS_QUERY"], os.environ["TPU_ACCELERATOR_TYPE"]) == ("1", "v6e-8")


def test_the_memory_of_each_device():
    """Half of the rows of x and all of w go in; the new x takes the place of the old; the square is in between."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(lambda x, w: (x @ w, jnp.sort(x @ w @ w).sum()), donate_argnums=0, out_shardings=(rows, None))
    use = memory(step.lower(x, w).compile())
    shard = 4 * 8 * 8
    assert (use.arguments, use.aliased) == (shard + 4 * 8 * 8, shard)
    assert shard + 4 <= use.outputs < shard + 64  # the tuple of two pointers is counted, too
    assert use.temporaries >= shard
    assert use.peak == use.arguments + use.outputs + use.temporaries - shard


def test_memory_is_added_up_unless_the_compiler_says_what_is_there_at_once():
    assert MemoryUse(arguments=100, outputs=60, temporaries=30, aliased=50).peak == 140
    assert MemoryUse(arguments=100, outputs=60, temporaries=30, aliased=50, live=120).peak == 120


@needs_libtpu
def test_the_tpu_compiler_accepts_temporaries_that_add_up_to_more_than_it_has():
    """Five matrices go in; four results are kept, and each is summed up."""
    whole = NamedSharding(Mesh(np.array(tpu_devices("v5e:1x1")), "data"), PartitionSpec())
    weights, x = (jax.ShapeDtypeStruct((*n, 16384, 16384), jnp.float32, sharding=whole) for n in ((4,), ()))

    def program(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)[1].sum()

    use = memory(jax.jit(program).lower(weights, x).compile())
    assert use.arguments < use.peak < use.arguments + use.outputs + use.temporaries - use.aliased
    assert use.peak < find_chip("v5e:1x1").memory


@pytest.mark.parametrize(
    ("work", "bound"),
    [((197e12, 1e9, 1e9), "compute"), ((1e12, 819e9, 1e9), "memory"), ((1e12, 1e9, 200e9), "interconnect")],
)
def test_the_slowest_bounds_a_step(work, bound):
    estimate = roofline(*work, find_chip("v5e:2x2"))
    assert estimate.bound == bound
    assert estimate.seconds == getattr(estimate, bound) == 1


def test_a_device_that_is_half_a_chip_has_half_of_everything():
    estimate = roofline(123e12, 900e9, 332e9, find_chip("TPU v3"))
    assert (estimate.compute, estimate.memory, estimate.interconnect) == (2, 2, 2)
