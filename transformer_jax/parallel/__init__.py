"""Running one step on many devices: logical axes, and strategies."""

from transformer_jax.parallel.axes import constrain, partition
from transformer_jax.parallel.strategy import Strategy, StrategyName, give_threads_to_devices

__all__ = ["Strategy", "StrategyName", "constrain", "give_threads_to_devices", "partition"]
