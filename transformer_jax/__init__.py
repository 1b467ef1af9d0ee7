"""The Transformer family in JAX and Flax: pure functions, exact training, pictures of attention."""

from transformer_jax import data, decoding, functional, interop, layers, models, parallel, tasks, training
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained, save_pretrained

__all__ = [
    "UserError",
    "data",
    "decoding",
    "from_pretrained",
    "functional",
    "interop",
    "layers",
    "models",
    "parallel",
    "save_pretrained",
    "tasks",
    "training",
]
__version__ = "0.1.0"
