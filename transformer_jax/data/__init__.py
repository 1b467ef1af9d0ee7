"""Where examples come from and how they become batches."""

from transformer_jax.data.batches import Batches, Bucket, Layout, Shard
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.datasets import Datasets
from transformer_jax.data.dates import Dates
from transformer_jax.data.files import Files
from transformer_jax.data.mixture import Mixture
from transformer_jax.data.processor import Processor, ProcessorConfig
from transformer_jax.data.records import Records
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.source import Document, Record, Source, Split
from transformer_jax.data.store import Store
from transformer_jax.data.text import Text
from transformer_jax.data.tfds import Tfds
from transformer_jax.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "Batches",
    "BatchingConfig",
    "Bucket",
    "Chunks",
    "Column",
    "Datasets",
    "Dates",
    "Document",
    "Example",
    "Files",
    "Layout",
    "Mixture",
    "Processor",
    "ProcessorConfig",
    "Record",
    "Records",
    "Rows",
    "Shard",
    "Source",
    "Split",
    "Store",
    "Text",
    "Tfds",
    "Tokenizer",
    "TokenizerConfig",
    "token_column",
]
