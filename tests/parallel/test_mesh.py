"""Meshes over several slices, whose network is slow: only the data axis goes over it."""

from types import SimpleNamespace

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.parallel.axes import MESH_AXES
from transformer_jax.parallel.mesh import MeshConfig, _over_slices


def devices(slices, each):
    return [
        SimpleNamespace(id=number, slice_index=number // each, process_index=0, platform="gpu", device_kind="fake")
        for number in range(slices * each)
    ]


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"tensor": 2, "sequence": 2}, {"fsdp": 2}])
def test_all_axes_but_data_stay_within_a_slice(axes):
    config, there = MeshConfig(**axes), devices(slices=2, each=4)
    sizes = config.sizes(len(there))
    arranged = _over_slices(sizes, 2, there)
    assert arranged.shape == tuple(sizes[name] for name in MESH_AXES)
    assert sorted(device.id for device in arranged.flat) == list(range(8))
    for replica in arranged:  # along data
        assert len({device.slice_index for device in replica.flat}) == 1
    first, second = np.split(arranged, 2)
    assert {device.slice_index for device in first.flat} == {0} and {d.slice_index for d in second.flat} == {1}


def test_a_data_axis_that_does_not_go_over_the_slices_is_an_error():
    there = devices(slices=2, each=4)
    with pytest.raises(UserError, match=r"mesh.data=1 does not divide over 2 slices; use a multiple of 2"):
        _over_slices(MeshConfig(fsdp=8).sizes(8), 2, there)
    with pytest.raises(UserError, match=r"mesh.slices=4, but the devices are of 2 slices"):
        _over_slices(MeshConfig().sizes(8), 4, there)
