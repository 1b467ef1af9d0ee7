import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import word_embedding

TEXTS = ["the cat sat on the mat", "the mat sat"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS * 5, TokenizerConfig(kind="wordpiece", vocab_size=60))


def write(path, vectors):
    lines = [f"{len(vectors)} 3", *(f"{word} {' '.join(map(str, vector))}" for word, vector in vectors.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_are_the_vectors_of_their_words_and_the_others_are_as_large(tokenizer, tmp_path):
    vectors = {"the": [5.0, -5.0, 5.0], "cat": [-5.0, 5.0, -5.0], "zebra": [9.0, 9.0, 9.0]}
    embedding, found = word_embedding(write(tmp_path / "v.txt", vectors), tokenizer, rngs=nnx.Rngs(0))
    ids = tokenizer.encode(["on the cat"])[0][-2:]
    assert tokenizer.decode([ids]) == [" the cat"]
    np.testing.assert_array_equal(embedding(jnp.array([ids]))[0], [vectors["the"], vectors["cat"]])
    assert found.missing == tokenizer.vocab_size - 2
    others = np.asarray(embedding.table[...])[~found.found]
    assert 3 < others.std() < 7 and abs(others.mean()) < 2


def test_vectors_of_other_words_are_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match="has a vector for none of the tokenizer's"):
        word_embedding(write(tmp_path / "v.txt", {"zebra": [1.0, 2.0, 3.0]}), tokenizer, rngs=nnx.Rngs(0))
