"""The Transformer family in JAX and Flax."""

from transformer_jax import functional, layers, models
from transformer_jax.errors import UserError

__all__ = ["UserError", "functional", "layers", "models"]
__version__ = "0.1.0"
