"""Running one step on many devices: logical axes, shardings, strategies, the host."""

from transformer_jax.parallel.axes import constrain, partition
from transformer_jax.parallel.host import prepare_host
from transformer_jax.parallel.shardings import parameter_sharding
from transformer_jax.parallel.strategy import Strategy, StrategyName

__all__ = ["Strategy", "StrategyName", "constrain", "parameter_sharding", "partition", "prepare_host"]
