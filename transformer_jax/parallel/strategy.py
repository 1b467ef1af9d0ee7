"""How a step is run on this machine's devices: on one with `jit`, or on all with `pmap`.

A step is written once, for one device's shard of the batch; given an `axis_name`, it sums over the devices itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from transformer_jax.errors import UserError

StrategyName = Literal["auto", "jit", "pmap"]


@dataclass(frozen=True)
class Strategy:
    """One device (`axis_name` is None), or replicated data parallelism over all devices of this machine."""

    num_devices: int
    axis_name: str | None

    @classmethod
    def choose(cls, name: StrategyName) -> "Strategy":
        """The strategy of that name; `auto` is pmap where there are several devices."""
        if jax.process_count() > 1:
            raise UserError(
                f"there are {jax.process_count()} processes; a run takes one, with all devices of a machine"
            )
        count = jax.local_device_count()
        return cls(count, "data") if name == "pmap" or (name == "auto" and count > 1) else cls(1, None)

    @property
    def devices(self) -> list[jax.Device]:
        """The devices, in the order in which a batch is split over them: the same in training and evaluation."""
        return jax.local_devices()[: self.num_devices]

    def describe(self) -> str:
        """Where a step runs, in words: "pmap on 8 devices (TPU v4)"."""
        kind = self.devices[0].device_kind
        return (
            f"jit on one device ({kind})" if self.axis_name is None else f"pmap on {self.num_devices} devices ({kind})"
        )

    def compile(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The step `(state, batch) -> (state, metrics)` compiled. The state is replicated, and donated."""
        if self.axis_name is None:
            return jax.jit(step, donate_argnums=0)
        mapped = jax.pmap(
            step, self.axis_name, in_axes=(None, 0), out_axes=None, devices=self.devices, donate_argnums=0
        )
        return lambda state, batch: mapped(state, jax.tree.map(self._split, batch))

    def replicate(self, tree: Any) -> Any:
        """A tree of arrays, replicated on every device."""
        return jax.device_put(tree, self.replicated)

    @property
    def replicated(self) -> Sharding:
        """The sharding of an array that is on every device."""
        return self._sharding(PartitionSpec())

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The batch split over the devices, for functions under plain `jit` with a model that is replicated on them."""
        return jax.device_put(dict(batch), self._sharding(PartitionSpec(self.axis_name)))

    def feed(self, batches: Iterator[Mapping[str, np.ndarray]]) -> Iterator[Mapping[str, Any]]:
        """The batches for a compiled step, each sent to the device while the step before it runs."""
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

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        if self.axis_name is None:
            return SingleDeviceSharding(self.devices[0])
        # Not `jax.make_mesh`, which reorders the chips of a TPU host: pmap does not, and jit refuses to mix the two.
        return NamedSharding(Mesh(np.array(self.devices), self.axis_name, axis_types=(AxisType.Auto,)), spec)

    def _split(self, x: np.ndarray) -> np.ndarray:
        if x.shape[0] % self.num_devices:
            raise ValueError(f"a batch of {x.shape[0]} rows does not divide over {self.num_devices} devices")
        return x.reshape(self.num_devices, -1, *x.shape[1:])
