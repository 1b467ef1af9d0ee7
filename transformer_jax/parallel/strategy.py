"""How a step is run on the devices: with `jit` on a mesh, or replicated with `pmap`.

A step is written once, for the global batch. Under `jit` the compiler divides it over the mesh, by the shardings of the
state and the batch. Under `pmap`, given an `axis_name`, a step is that of one device's shard and sums over the devices
itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from transformer_jax.errors import UserError
from transformer_jax.parallel.axes import MESH_AXES, Rules, axis_rules
from transformer_jax.parallel.compiled import Compiled, CompiledStep
from transformer_jax.parallel.mesh import MeshConfig
from transformer_jax.parallel.shardings import tree_shardings

StrategyName = Literal["jit", "pmap"]


@dataclass(frozen=True)
class Strategy:
    """The devices of all processes as a mesh, and what is sharded over which of its axes."""

    mesh: Mesh
    rules: Rules = Rules()
    axis_name: str | None = field(default=None, kw_only=True)
    """The axis that a step under `pmap` sums over; None is `jit`."""

    @classmethod
    def choose(
        cls,
        name: StrategyName = "jit",
        mesh: MeshConfig = MeshConfig(),
        rules: Rules = Rules(),
        devices: list[jax.Device] | None = None,
    ) -> "Strategy":
        """The strategy of that name on these devices, by default on all devices of all processes."""
        devices = mesh.chosen(jax.devices() if devices is None else devices)
        if name == "jit":
            return cls(mesh.build(devices), rules)
        if name != "pmap":
            raise UserError(f"strategy={name!r} is unknown; choose jit or pmap")
        sizes = mesh.sizes(len(devices))
        for axis in MESH_AXES[1:]:
            if sizes[axis] > 1:
                raise UserError(
                    f"strategy=pmap has all weights on every device, and mesh.{axis}={sizes[axis]} shards them; set "
                    "strategy to jit"
                )
        return cls.pmap(devices)

    @classmethod
    def pmap(cls, devices: list[jax.Device]) -> "Strategy":
        """Replicated data parallelism over these devices.

        Not by `MeshConfig.build`, which reorders the chips of a TPU: pmap does not, and jit refuses to mix the two.
        """
        return cls(Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,)), axis_name="data")

    @property
    def devices(self) -> list[jax.Device]:
        """The devices, in the order in which a batch is split over them."""
        return list(self.mesh.devices.flat)

    @property
    def num_row_shards(self) -> int:
        """The number of shards that the rows of a batch are split into; their number must be a multiple of it."""
        return prod(self.mesh.shape[axis] for axis in self._row_axes)

    @cached_property
    def process_rows(self) -> tuple[tuple[int, ...], int]:
        """Which shards of a batch this process makes, and of how many: ((0,), 1) is all of it.

        Processes that share their rows over another axis make the same. The shards of a process need not lie together:
        a TPU's chips come in an order of their own.
        """
        shape = (self.num_row_shards,)
        indices = NamedSharding(self.mesh, self._row_spec).addressable_devices_indices_map(shape).values()
        mine = {start for index in indices if index is not None for start in range(*index[0].indices(shape[0]))}
        return (tuple(sorted(mine)), shape[0]) if 0 < len(mine) < shape[0] else ((0,), 1)

    def describe(self) -> str:
        """Where a step runs, in words: "jit on 8 devices (TPU v4), data=4 tensor=2"."""
        count, kind = self.mesh.size, self.devices[0].device_kind
        if count == 1 and self.axis_name is None:
            return f"jit on one device ({kind})"
        axes = " ".join(f"{name}={size}" for name, size in self.mesh.shape.items() if size > 1)
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return f"{'jit' if self.axis_name is None else 'pmap'} on {count} devices{processes} ({kind}), {axes}"

    @contextmanager
    def context(self) -> Iterator[None]:
        """While inside, `constrain` and `parameter_sharding` go by this mesh and these rules."""
        with ExitStack() as stack:
            stack.enter_context(axis_rules(self.rules))
            stack.enter_context(jax.set_mesh(self.mesh))
            yield

    def shardings(self, tree: Any) -> Any:
        """The sharding of every array of a tree of declared weights, such as a model or a training state."""
        return tree_shardings(tree, self.mesh, self.rules)

    def jit(self, function: Callable[..., Any], **settings: Any) -> Compiled:
        """A function compiled for this mesh; `settings` are those of `jax.jit`."""
        return Compiled(jax.jit(function, **settings), self.context)

    def initialize(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of few or no arrays makes, each array in its own shards from the beginning."""
        shardings = self.shardings(jax.eval_shape(function, *arguments))
        return self.jit(function, out_shardings=shardings)(*arguments)

    def compile(self, step: Callable[[Any, Any], Any], state: Any) -> CompiledStep:
        """The step `(state, batch) -> (state, metrics)` compiled. The state keeps its shardings, and is donated."""
        if self.axis_name is None:
            shardings = jax.tree.map(lambda x: x.sharding, state)
            return CompiledStep(self.jit(step, donate_argnums=0, out_shardings=(shardings, self.replicated)))
        local = [device for device in self.devices if device.process_index == jax.process_index()]
        devices = self.devices if jax.process_count() == 1 else None
        mapped = jax.pmap(step, self.axis_name, in_axes=(None, 0), out_axes=None, devices=devices, donate_argnums=0)

        def call(state: Any, batch: Any) -> Any:
            outputs = mapped(state, jax.tree.map(partial(_split, count=len(local)), batch))
            return outputs if jax.process_count() == 1 else jax.tree.map(self._globally_replicated, outputs)

        return CompiledStep(call)

    def replicate(self, tree: Any) -> Any:
        """A tree of arrays, replicated on every device."""
        return jax.device_put(tree, self.replicated)

    @property
    def replicated(self) -> Sharding:
        """The sharding of an array that is on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The rows that this process has made, as its part of a global batch."""
        shards, count = self.process_rows
        sharding = NamedSharding(self.mesh, self._row_spec)

        def placed(local: np.ndarray) -> jax.Array:
            size = local.shape[0] // len(shards)

            def rows(where: Any) -> np.ndarray:
                start, stop, _ = where[0].indices(size * count)
                first = shards.index(start // size) * size + start % size
                return local[(slice(first, first + stop - start), *where[1:])]

            return jax.make_array_from_callback((size * count, *local.shape[1:]), sharding, rows)

        return {name: placed(np.asarray(array)) for name, array in batch.items()}

    def feed(self, batches: Iterator[Mapping[str, np.ndarray]]) -> Iterator[Mapping[str, Any]]:
        """The batches for a compiled step, each sent to the devices while the step before it runs."""
        if self.axis_name is not None:
            yield from batches  # pmap splits and sends them itself
            return
        upcoming = None
        for batch in batches:
            sent = self.place(batch)
            if upcoming is not None:
                yield upcoming
            upcoming = sent
        if upcoming is not None:
            yield upcoming

    @property
    def _row_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.rules.batch if axis in self.mesh.axis_names)

    @property
    def _row_spec(self) -> PartitionSpec:
        return PartitionSpec(self._row_axes or None)

    def _globally_replicated(self, x: jax.Array) -> jax.Array:
        """What pmap gives is known to be on the devices of this process only; it is on all."""
        return jax.make_array_from_single_device_arrays(
            x.shape, self.replicated, [shard.data for shard in x.addressable_shards]
        )


def _split(x: np.ndarray, count: int) -> np.ndarray:
    if x.shape[0] % count:
        raise ValueError(f"a batch of {x.shape[0]} rows does not divide over {count} devices")
    return x.reshape(count, -1, *x.shape[1:])
