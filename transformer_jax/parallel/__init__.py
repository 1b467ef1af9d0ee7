"""Running one step on many devices: logical axes, the mesh, shardings, strategies, the host."""

from typing import Any

from transformer_jax.parallel.axes import Rules, axis_rules, constrain, partition
from transformer_jax.parallel.distributed import start_jax
from transformer_jax.parallel.host import prepare_host
from transformer_jax.parallel.mesh import MeshConfig
from transformer_jax.parallel.peers import Peers, alone, connect
from transformer_jax.parallel.processes import Processes, find_processes
from transformer_jax.parallel.shardings import parameter_sharding, tree_shardings
from transformer_jax.parallel.strategy import Strategy, StrategyName
from transformer_jax.parallel.watchdog import Watchdog


def verify(config: Any, meshes: Any = None, **settings: Any) -> list[Any]:
    """Compute the first steps of a config in every way, and say how the losses and gradients differ.

    See `transformer_jax.training.verify.verify`, which this is: it is made of all that is above this package.
    """
    from transformer_jax.training import verify as above

    return above.verify(config, meshes, **settings)


__all__ = [
    "MeshConfig",
    "Peers",
    "Processes",
    "Rules",
    "Strategy",
    "StrategyName",
    "Watchdog",
    "alone",
    "axis_rules",
    "connect",
    "constrain",
    "find_processes",
    "parameter_sharding",
    "partition",
    "prepare_host",
    "start_jax",
    "tree_shardings",
    "verify",
]
