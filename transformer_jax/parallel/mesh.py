"""The mesh: the devices of all processes, along named axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from transformer_jax.errors import UserError
from transformer_jax.parallel.axes import MESH_AXES, MeshAxis


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis of the mesh; their product is the number of devices in use."""

    data: int | None = None
    """Number of devices that share a batch and have each all weights; None takes all that the other axes leave, a
    smaller number leaves devices of a single process unused."""
    fsdp: int = 1
    """Number of devices that share a batch and the weights: each keeps a shard of every weight."""
    expert: int = 1
    """Number of devices that share a batch and the experts of a mixture."""
    sequence: int = 1
    """Number of devices that share the tokens of each row, for long inputs: attention goes round a ring of them."""
    tensor: int = 1
    """Number of devices that share the heads, the hidden units and the vocabulary of each layer."""
    slices: int | None = None
    """Number of TPU slices, over which the data axis is laid out first; None takes those that there are."""

    def __post_init__(self):
        for name in (*MESH_AXES, "slices"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UserError(f"mesh.{name} must be at least 1; got {size}")

    def sizes(self, num_devices: int) -> dict[MeshAxis, int]:
        """The size of each axis on so many devices."""
        others = {name: getattr(self, name) for name in MESH_AXES if name != "data"}
        product = prod(others.values())
        data = num_devices // product if self.data is None else self.data
        if data * product != num_devices:
            asked = " * ".join(f"{name}={size}" for name, size in others.items() if size > 1)
            if self.data is None:
                more = f"; JAX_NUM_CPU_DEVICES={product} simulates as many on a CPU" if num_devices < product else ""
                raise UserError(
                    f"the mesh {asked} does not divide {num_devices} devices; use sizes whose product divides "
                    f"{num_devices}{more}"
                )
            asked = " * ".join(filter(None, (f"data={data}", asked)))
            raise UserError(
                f"the mesh {asked} has {data * product} devices, but there are {num_devices}; leave mesh.data out to "
                "take all that the other axes leave"
            )
        return {name: data if name == "data" else others[name] for name in MESH_AXES}

    def chosen(self, devices: Sequence[jax.Device]) -> list[jax.Device]:
        """The devices to use: all, or the first of them where the sizes of all axes are given and one process runs."""
        asked = None if self.data is None else prod(getattr(self, name) for name in MESH_AXES)
        if asked is None or asked >= len(devices) or len({device.process_index for device in devices}) > 1:
            return list(devices)
        return list(devices[:asked])

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh of these devices, by default of all devices of all processes."""
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        slices = len({_slice_of(device) for device in devices}) if self.slices is None else self.slices
        shape = tuple(sizes.values())
        if slices == 1:
            arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        else:
            arranged = _over_slices(sizes, slices, devices)
        return Mesh(arranged, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _over_slices(sizes: dict[MeshAxis, int], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of several slices: the data axis goes over the slow network between them, all else stays within one."""
    found = len({_slice_of(device) for device in devices})
    if found != slices:
        raise UserError(f"mesh.slices={slices}, but the devices are of {found} slices; leave mesh.slices out")
    if sizes["data"] % slices:
        raise UserError(
            f"mesh.data={sizes['data']} does not divide over {slices} slices; use a multiple of {slices}, or smaller "
            "other axes"
        )
    within = tuple(size // slices if name == "data" else size for name, size in sizes.items())
    between = tuple(slices if name == "data" else 1 for name in sizes)
    return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)


def _slice_of(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0
