"""Where examples come from and how they become batches."""

from transformer_jax.data.batches import Batches, Part
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.dates import Dates
from transformer_jax.data.files import Files
from transformer_jax.data.mixture import Mixture
from transformer_jax.data.records import Records
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.source import Record, Source, Split
from transformer_jax.data.store import Store
from transformer_jax.data.text import Text
from transformer_jax.data.tfds import Tfds
from transformer_jax.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "Batches",
    "BatchingConfig",
    "Chunks",
    "Dates",
    "Files",
    "Mixture",
    "Part",
    "Record",
    "Records",
    "Rows",
    "Source",
    "Split",
    "Store",
    "Text",
    "Tfds",
    "Tokenizer",
    "TokenizerConfig",
]
