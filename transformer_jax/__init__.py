"""The Transformer family in JAX and Flax: pure functions, exact training, pictures of attention."""

from transformer_jax import data, decoding, functional, layers, models, parallel, tasks, training
from transformer_jax.errors import UserError

__all__ = ["UserError", "data", "decoding", "functional", "layers", "models", "parallel", "tasks", "training"]
__version__ = "0.1.0"
