"""What a model is trained for: how examples become batches, what the loss is, how well it does."""

from transformer_jax.tasks.scores import BleuTokenizer
from transformer_jax.tasks.translation import DecodingConfig, Translation

__all__ = ["BleuTokenizer", "DecodingConfig", "Translation"]
