"""Word vectors as the input embedding of a model."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.word_vectors import WordVectors, load_word_vectors, spellings
from transformer_jax.layers import Embedding, normal


def word_embedding(path: Path, tokenizer: Tokenizer, *, rngs: nnx.Rngs) -> tuple[Embedding, WordVectors]:
    """An embedding whose rows are the vectors of a tokenizer's tokens in a word2vec file, and the vectors found.

    A token that is not a whole word, or has no vector, is initialized from a normal distribution with the standard
    deviation of the vectors that were found; `vectors.missing` counts these tokens.
    """
    vectors = load_word_vectors(Path(path), spellings(tokenizer.vocabulary()))
    if not vectors.found.any():
        raise UserError(f"{path} has a vector for none of the tokenizer's {len(vectors.found)} tokens")
    num_ids, size = vectors.table.shape
    standard_deviation = float(vectors.table[vectors.found].std())
    embedding = Embedding(num_ids, size, initializer=normal(standard_deviation), rngs=rngs)
    table = jnp.where(vectors.found[:, None], vectors.table, embedding.table[...])
    embedding.table = embedding.table.replace(table)  # type: ignore[assignment]
    return embedding, vectors
