"""Logical axis names, and the mesh axes that they are sharded over."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Literal, get_args

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from transformer_jax.errors import UserError

MeshAxis = Literal["data", "fsdp", "expert", "sequence", "tensor"]
"""The axes of a mesh, from the slowest to the fastest connection that each needs."""

MESH_AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)


@dataclass(frozen=True)
class Rules:
    """The mesh axes that each logical axis is sharded over. A logical axis that is not named here is replicated."""

    batch: tuple[MeshAxis, ...] = ("data", "fsdp", "expert")
    """Mesh axes that the rows of a batch are sharded over."""
    length: tuple[MeshAxis, ...] = ("sequence",)
    """Mesh axes that the tokens of a row are sharded over."""
    heads: tuple[MeshAxis, ...] = ("tensor",)
    """Mesh axes that attention heads are sharded over."""
    ff: tuple[MeshAxis, ...] = ("tensor",)
    """Mesh axes that the hidden units of the feed-forward network are sharded over."""
    vocab: tuple[MeshAxis, ...] = ("tensor",)
    """Mesh axes that the ids of the vocabulary are sharded over."""
    embed: tuple[MeshAxis, ...] = ("fsdp",)
    """Mesh axes that the model's features are sharded over in each weight."""
    experts: tuple[MeshAxis, ...] = ("expert",)
    """Mesh axes that the experts of a mixture are sharded over."""

    def __post_init__(self):
        for field in fields(self):
            given = getattr(self, field.name)
            unknown = [axis for axis in given if axis not in MESH_AXES]
            if unknown:
                raise UserError(f"rules.{field.name} has {unknown[0]!r}; choose among {', '.join(MESH_AXES)}")
            if len(set(given)) < len(given):
                raise UserError(f"rules.{field.name}={given} names a mesh axis twice; name each once")

    def of(self, name: str | None) -> tuple[MeshAxis, ...]:
        """The mesh axes of a logical axis."""
        return getattr(self, name, ()) if name in _LOGICAL_AXES else ()


_LOGICAL_AXES = frozenset(field.name for field in fields(Rules))
_current = jax.make_user_context(default_value=Rules())  # which is a part of what `jit` caches by


def axis_rules(rules: Rules) -> AbstractContextManager[None]:
    """While inside, logical axes are sharded by these rules."""
    return _current(rules)


def current_rules() -> Rules:
    """The rules that logical axes are sharded by here."""
    return _current.value


def partition(names: tuple[str | None, ...], mesh_axes: tuple[str, ...], rules: Rules | None = None) -> PartitionSpec:
    """The partition of an array with these logical axes over a mesh with those axes, each of which is used once."""
    rules = current_rules() if rules is None else rules
    spec: list[tuple[str, ...] | None] = []
    taken: dict[str, str | None] = {}
    for name in names:
        used = tuple(axis for axis in rules.of(name) if axis in mesh_axes)
        for axis in used:
            if axis in taken:
                raise UserError(
                    f"the axes {taken[axis]!r} and {name!r} of an array {names} both lie on the mesh axis {axis!r}; "
                    f"set rules.{name}=() to replicate one of them, or use a mesh without {axis!r}"
                )
            taken[axis] = name
        spec.append(used or None)
    return PartitionSpec(*spec)


def automatic_axes() -> dict[str, int]:
    """The axes of the current mesh (`jax.set_mesh`) whose layout is left to the compiler, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind == AxisType.Auto}


def constrain(x: Array, *names: str | None) -> Array:
    """Shard an array by its logical axes over the current mesh (`jax.set_mesh`), if there is one."""
    axes = tuple(automatic_axes())
    return jax.lax.with_sharding_constraint(x, partition(names, axes)) if axes else x
