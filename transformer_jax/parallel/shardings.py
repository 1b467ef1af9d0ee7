"""How the parameters of a model are laid out on a mesh: by the logical axes that each of them declares."""

from math import prod
from typing import Protocol

from jax.sharding import AxisType, Mesh, NamedSharding

from transformer_jax.parallel.axes import partition


class Declared(Protocol):
    """An array, or the shape of one, with the names of its logical axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical name of each axis."""


def parameter_sharding(parameter: Declared, mesh: Mesh, *, name: str = "the parameter") -> NamedSharding:
    """The sharding of a parameter on a mesh, by its declared logical axes.

    Our models leave the layout of what they compute to the compiler. On a mesh with explicit axes, which
    `jax.make_mesh` gives by default, JAX would demand it of them: the sharding has the same devices with automatic
    axes instead.

    Args:
        parameter: What is laid out: an `nnx.Param` as `layers.parameter` makes it, abstract or not.
        mesh: The devices. Of its axes, those that no logical axis lies on replicate the parameter.
        name: What errors call the parameter, such as its path in the model.

    Raises:
        ValueError: If a dimension does not divide over its mesh axes, or two dimensions lie on one mesh axis.
    """
    try:
        spec = partition(parameter.axes, mesh.axis_names)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for axis, size, mesh_axes in zip(parameter.axes, parameter.shape, spec, strict=True):
        used = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,) if mesh_axes else ()
        count = prod(mesh.shape[mesh_axis] for mesh_axis in used)
        if size % count:
            raise ValueError(f"{name}: {_does_not_divide(axis, size, used, mesh)}")
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return NamedSharding(automatic, spec)


def _does_not_divide(axis: str | None, size: int, mesh_axes: tuple[str, ...], mesh: Mesh) -> str:
    given = ", ".join(f"{mesh_axis}={mesh.shape[mesh_axis]}" for mesh_axis in mesh_axes)
    fitting = [str(count) for count in range(1, mesh.size + 1) if size % count == 0]
    wanted = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else fitting[0]
    if len(mesh_axes) == 1:
        return f"{axis}={size} does not divide over the mesh axis {given}; use a {mesh_axes[0]} size of {wanted}"
    return f"{axis}={size} does not divide over the mesh axes {given}; use sizes whose product is {wanted}"
