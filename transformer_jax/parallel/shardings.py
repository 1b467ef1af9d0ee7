"""How the parameters of a model are laid out on a mesh: by the logical axes that each of them declares."""

from math import prod
from typing import Any, Protocol, TypeGuard

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError
from transformer_jax.parallel.axes import Rules, partition


class Declared(Protocol):
    """An array, or the shape of one, with the names of its logical axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """The logical name of each axis."""


def parameter_sharding(
    parameter: Declared, mesh: Mesh, rules: Rules | None = None, *, name: str = "the parameter"
) -> NamedSharding:
    """The sharding of a parameter on a mesh, by its declared logical axes.

    Our models leave the layout of what they compute to the compiler. On a mesh with explicit axes, which
    `jax.make_mesh` gives by default, JAX would demand it of them: the sharding has the same devices with automatic
    axes instead.

    Args:
        parameter: What is laid out: an `nnx.Param` as `layers.parameter` makes it, abstract or not.
        mesh: The devices. Of its axes, those that no logical axis lies on replicate the parameter.
        rules: The mesh axes of each logical axis; those of `axis_rules` by default.
        name: What errors call the parameter, such as its path in the model.

    Raises:
        UserError: If a dimension does not divide over its mesh axes, or two dimensions lie on one mesh axis.
    """
    try:
        spec = partition(parameter.axes, mesh.axis_names, rules)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    for axis, size, mesh_axes in zip(parameter.axes, parameter.shape, spec, strict=True):
        used = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,) if mesh_axes else ()
        if size % prod(mesh.shape[mesh_axis] for mesh_axis in used):
            raise UserError(f"{name}: {_does_not_divide(axis, size, used, mesh)}")
    return NamedSharding(automatic(mesh), spec)


def automatic(mesh: Mesh) -> Mesh:
    """The same mesh, on which the compiler lays out what is computed."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def tree_shardings(tree: Any, mesh: Mesh, rules: Rules | None = None) -> Any:
    """The sharding of every array of a tree: by its declared axes where it has some, else replicated.

    An optimizer's statistics keep the declaration of their weight. Those of another rank, such as the row and column
    sums of Adafactor, no longer have its axes, and are small: they are replicated.
    """

    def sharding(path: Any, leaf: Any) -> Any:
        if not is_declared(leaf):
            return NamedSharding(automatic(mesh), PartitionSpec())
        if len(leaf.axes) != len(leaf.shape):
            return leaf.replace(NamedSharding(automatic(mesh), PartitionSpec()))  # type: ignore[attr-defined]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return leaf.replace(parameter_sharding(leaf, mesh, rules, name=name))  # type: ignore[attr-defined]

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=is_declared)


def is_declared(leaf: Any) -> TypeGuard[Declared]:
    """Whether a node of a tree is an array with logical axes."""
    return isinstance(getattr(leaf, "axes", None), tuple) and hasattr(leaf, "shape")


def _does_not_divide(axis: str | None, size: int, mesh_axes: tuple[str, ...], mesh: Mesh) -> str:
    given = ", ".join(f"{mesh_axis}={mesh.shape[mesh_axis]}" for mesh_axis in mesh_axes)
    fitting = [str(count) for count in range(1, mesh.size + 1) if size % count == 0]
    wanted = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if len(fitting) > 1 else fitting[0]
    if len(mesh_axes) == 1:
        where, remedy = f"the mesh axis {given}", f"use a {mesh_axes[0]} size of {wanted}"
    else:
        where, remedy = f"the mesh axes {given}", f"use sizes whose product is {wanted}"
    return (
        f"{axis}={size} does not divide over {where}; set rules.{axis}=() to replicate it (--rules.{axis} with nothing "
        f"after it), or {remedy}"
    )
