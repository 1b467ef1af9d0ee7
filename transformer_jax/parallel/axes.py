"""Logical axis names and where they lie on a mesh."""

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "heads": ("tensor",),
    "ff": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "experts": ("expert",),
}
"""Mesh axes of each logical axis. An axis that is not named here, or not on the mesh, is whole on every device."""


def partition(names: tuple[str | None, ...], mesh_axes: tuple[str, ...]) -> PartitionSpec:
    """The partition of an array with these logical axes over those axes of a mesh; each mesh axis is used once."""
    free = list(mesh_axes)
    spec = []
    for name in names:
        used = tuple(axis for axis in RULES.get(name or "", ()) if axis in free)
        free = [axis for axis in free if axis not in used]
        spec.append(used or None)
    return PartitionSpec(*spec)


def constrain(x: Array, *names: str | None) -> Array:
    """The same array with its logical axes named, for the compiler to lay it out on the mesh, where there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)
    return jax.lax.with_sharding_constraint(x, partition(names, axes)) if axes else x
