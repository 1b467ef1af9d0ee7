"""Logical axis names, and the mesh axes that they are sharded over."""

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
"""The mesh axes of each logical axis. An axis that is not named here, or not on the mesh, is replicated."""


def partition(names: tuple[str | None, ...], mesh_axes: tuple[str, ...]) -> PartitionSpec:
    """The partition of an array with these logical axes over a mesh with those axes, each of which is used once."""
    spec: list[tuple[str, ...] | None] = []
    taken: dict[str, str | None] = {}
    for name in names:
        used = tuple(axis for axis in RULES.get(name or "", ()) if axis in mesh_axes)
        for axis in used:
            if axis in taken:
                raise ValueError(
                    f"the axes {taken[axis]!r} and {name!r} of an array {names} both lie on the mesh axis {axis!r}; "
                    f"name one of them None, or use a mesh without {axis!r}"
                )
            taken[axis] = name
        spec.append(used or None)
    return PartitionSpec(*spec)


def constrain(x: Array, *names: str | None) -> Array:
    """Shard an array by its logical axes over the current mesh (`jax.set_mesh`), if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)
    return jax.lax.with_sharding_constraint(x, partition(names, axes)) if axes else x
