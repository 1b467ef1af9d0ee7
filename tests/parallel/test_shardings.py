"""Parameters on a mesh: each by its own logical axes, and an error where these do not fit."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from transformer_jax.parallel import parameter_sharding


def declared(**axes: int):
    return SimpleNamespace(shape=tuple(axes.values()), axes=tuple(axes))


def mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def test_a_device_has_its_own_shard_of_each_logical_axis():
    sharding = parameter_sharding(declared(layers=3, embed=4, heads=6, head=5), mesh(data=2, fsdp=2, tensor=2))
    assert sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert sharding.shard_shape((3, 4, 6, 5)) == (3, 2, 3, 5)
    array = jax.device_put(np.arange(3 * 4 * 6 * 5).reshape(3, 4, 6, 5), sharding)
    shard = next(shard for shard in array.addressable_shards if shard.device == jax.devices()[3])
    np.testing.assert_array_equal(shard.data, np.arange(360).reshape(3, 4, 6, 5)[:, 2:, 3:])  # data 0, fsdp 1, tensor 1


def test_what_lies_on_no_axis_of_the_mesh_is_replicated():
    assert parameter_sharding(declared(labels=3), mesh(tensor=8)).is_fully_replicated
    assert parameter_sharding(declared(heads=3), mesh(data=8)).is_fully_replicated


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        (
            {"embed": 8, "heads": 6},
            {"data": 2, "tensor": 4},
            "decoder.query: heads=6 does not divide over the mesh axis tensor=4; set rules.heads=\\(\\) to "
            ".* or use a tensor size of 1, 2, 3 or 6",
        ),
        ({"vocab": 7}, {"tensor": 2}, "vocab=7 does not divide .*tensor=2; .* or use a tensor size of 1"),
        (
            {"batch": 6},
            {"data": 2, "fsdp": 2},
            "batch=6 does not divide over the mesh axes data=2, fsdp=2; .* or use sizes whose product is 1, 2 or 3",
        ),
        ({"heads": 4, "ff": 4}, {"tensor": 2}, "decoder.query: the axes 'heads' and 'ff' .* both lie on the mesh axis"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(axes, sizes, message):
    with pytest.raises(ValueError, match=message):
        parameter_sharding(declared(**axes), mesh(**sizes), name="decoder.query")


def test_the_compiler_lays_out_what_is_computed_whatever_the_mesh_is_made_like():
    """With explicit axes, JAX would refuse this lookup: nothing says how its result is sharded."""
    explicit = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    sharding = parameter_sharding(declared(vocab=4, embed=2), explicit)
    table = jax.device_put(np.arange(8.0).reshape(4, 2), sharding)
    np.testing.assert_array_equal(jax.jit(lambda table, ids: table[ids])(table, np.array([3, 0])), [[6, 7], [0, 1]])
