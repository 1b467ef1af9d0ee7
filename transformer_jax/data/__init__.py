"""Where examples come from and how they become batches."""

from transformer_jax.data.batches import Batches, BatchingConfig
from transformer_jax.data.dates import Dates
from transformer_jax.data.source import Record, Source, Split
from transformer_jax.data.tfds import Tfds
from transformer_jax.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = ["Batches", "BatchingConfig", "Dates", "Record", "Source", "Split", "Tfds", "Tokenizer", "TokenizerConfig"]
