"""What a model is trained for: how raw examples become batches, what the loss is, how well it does."""

from transformer_jax.tasks.translation import DecodingConfig, Translation

__all__ = ["DecodingConfig", "Translation"]
