"""From a config to a trained model."""

from transformer_jax.training.config import Config
from transformer_jax.training.interrupt import Interrupted
from transformer_jax.training.loop import train
from transformer_jax.training.optimizer import OptimizerConfig, decays
from transformer_jax.training.run import Run
from transformer_jax.training.saved import load_arrays
from transformer_jax.training.start import transfer_weights
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import make_train_step

__all__ = [
    "Config",
    "Interrupted",
    "OptimizerConfig",
    "Run",
    "TrainState",
    "decays",
    "load_arrays",
    "make_train_step",
    "train",
    "transfer_weights",
]
