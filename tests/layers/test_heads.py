import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.layers import (
    ClassificationHead,
    Embedding,
    LanguageModelHead,
    PairHead,
    Pooler,
    SpanHead,
    TaggingHead,
    last_valid,
)

D, VOCAB, LABELS = 6, 9, 5


def vectors(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_weights(module):
    """The module with weights that are all random, biases and scales included."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), module)


@pytest.mark.parametrize(("activation", "function"), [("tanh", np.tanh), ("relu", lambda x: np.maximum(x, 0))])
def test_the_pooler_reads_the_first_token(activation, function):
    pooler, x = random_weights(Pooler(D, activation, rngs=nnx.Rngs(0))), vectors(2, 3, D)
    weight, bias = (np.asarray(array) for array in pooler.output.arrays())
    np.testing.assert_allclose(pooler(x), function(x[:, 0] @ weight + bias), atol=1e-5)


def test_the_last_valid_token_is_found_whichever_side_is_padded():
    x = vectors(4, 3, D)
    valid = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0]], bool)
    np.testing.assert_array_equal(jax.jit(last_valid)(x, valid), x[[0, 1, 2, 3], [2, 1, 2, 0]])
    np.testing.assert_array_equal(last_valid(x), x[:, -1])
    with pytest.raises(ValueError, match=r"valid has shape \(3, 4\) but x has batch and length \(4, 3\)"):
        last_valid(x, valid.T)
    with pytest.raises(TypeError, match="valid must be boolean, False at padding; got int32"):
        last_valid(x, valid.astype(np.int32))


def test_a_tied_head_is_the_embedding_transposed():
    embedding = Embedding(VOCAB, D, rngs=nnx.Rngs(0))
    head, x = LanguageModelHead(D, VOCAB, tied=True, scale=0.5, rngs=nnx.Rngs(0)), vectors(2, 3, D)
    assert not jax.tree.leaves(head)
    np.testing.assert_allclose(head(x, embedding), 0.5 * x @ np.asarray(embedding.table[...]).T, atol=1e-6)


def test_an_untied_head_has_its_own_table_and_never_reads_the_embedding():
    embedding = Embedding(VOCAB, D, rngs=nnx.Rngs(0))
    head = random_weights(LanguageModelHead(D, VOCAB, tied=False, bias=True, rngs=nnx.Rngs(0)))
    x = vectors(2, 3, D)
    table, bias = np.asarray(head.output.table[...]), np.asarray(head.bias[...])
    np.testing.assert_allclose(head(x, embedding), x @ table.T + bias, atol=1e-5)
    gradient = jax.grad(lambda embedding: jnp.sum(head(x, embedding)))(embedding)
    np.testing.assert_array_equal(gradient.table[...], 0)


def test_the_transform_comes_before_the_table():
    embedding, x = Embedding(VOCAB, D, rngs=nnx.Rngs(0)), vectors(2, 3, D)
    head = random_weights(
        LanguageModelHead(D, VOCAB, tied=True, bias=True, transform="relu", norm_epsilon=0.1, rngs=nnx.Rngs(0))
    )
    weight, bias = (np.asarray(array) for array in head.transform.arrays())
    hidden = np.maximum(x @ weight + bias, 0)
    centred = hidden - hidden.mean(-1, keepdims=True)
    scale, shift = np.asarray(head.norm.scale[...]), np.asarray(head.norm.bias[...])
    hidden = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1) * scale + shift
    expected = hidden @ np.asarray(embedding.table[...]).T + np.asarray(head.bias[...])
    np.testing.assert_allclose(head(x, embedding), expected, atol=1e-5)


HEADS = {
    "classification": (ClassificationHead(D, LABELS, 0.5, rngs=nnx.Rngs(0)), (4, D), ("embed", "labels")),
    "tagging": (TaggingHead(D, LABELS, 0.5, rngs=nnx.Rngs(0)), (4, 3, D), ("embed", "labels")),
    "span": (SpanHead(D, 0.5, rngs=nnx.Rngs(0)), (4, 3, D), ("embed", "span")),
    "pair": (PairHead(D, rngs=nnx.Rngs(0)), (4, D), ("embed", "pair")),
}


@pytest.mark.parametrize(("head", "shape", "axes"), HEADS.values(), ids=HEADS)
def test_a_head_is_a_linear_map_to_float32(head, shape, axes):
    assert head.output.weight.axes == axes and head.output.bias.axes == axes[1:]
    head, x = random_weights(head), vectors(*shape)
    weight, bias = (np.asarray(array) for array in head.output.arrays())
    np.testing.assert_allclose(head(x), x @ weight + bias, atol=1e-5)
    assert head(x.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("kind", ["classification", "tagging", "span"])
def test_a_head_drops_its_input_by_the_key_of_each_row(kind):
    head, shape, _ = HEADS[kind]
    head = jax.tree.map(jnp.ones_like, head)
    keys = jax.random.split(jax.random.key(0), 4)
    logits = np.asarray(head(np.ones(shape, np.float32), dropout_key=keys))
    # A sum of D ones, each dropped or doubled, and a bias of 1: odd numbers, not all of them alike.
    assert set(np.unique(logits)) <= {1 + 2 * n for n in range(D + 1)} and len(np.unique(logits)) > 1
    alone = np.asarray(head(np.ones((1, *shape[1:]), np.float32), dropout_key=keys[2:3]))
    np.testing.assert_array_equal(alone[0], logits[2])


def test_a_classification_head_may_lack_a_bias():
    head, x = ClassificationHead(D, LABELS, 0.0, bias=False, rngs=nnx.Rngs(0)), vectors(4, D)
    assert head.output.bias is None
    np.testing.assert_allclose(head(x), x @ np.asarray(head.output.weight[...]), atol=1e-6)
