"""Checkpoints of Hugging Face transformers in and out, and word vectors in."""

from transformer_jax.interop.embedding import word_embedding
from transformer_jax.interop.pretrained import Pretrained, from_pretrained, save_pretrained
from transformer_jax.interop.special_ids import SpecialIds
from transformer_jax.interop.word_vectors import WordVectors, load_word_vectors, spellings

__all__ = [
    "Pretrained",
    "SpecialIds",
    "WordVectors",
    "from_pretrained",
    "load_word_vectors",
    "save_pretrained",
    "spellings",
    "word_embedding",
]
