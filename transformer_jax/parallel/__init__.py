"""Running one step on many devices: logical axes, the mesh, shardings, strategies, the host."""

from transformer_jax.parallel.axes import Rules, axis_rules, constrain, partition
from transformer_jax.parallel.host import prepare_host
from transformer_jax.parallel.mesh import MeshConfig
from transformer_jax.parallel.shardings import parameter_sharding, tree_shardings
from transformer_jax.parallel.strategy import Strategy, StrategyName

__all__ = [
    "MeshConfig",
    "Rules",
    "Strategy",
    "StrategyName",
    "axis_rules",
    "constrain",
    "parameter_sharding",
    "partition",
    "prepare_host",
    "tree_shardings",
]
