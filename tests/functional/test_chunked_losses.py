"""Losses over a vocabulary without all of its logits in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax import functional as F
from transformer_jax.functional import losses

ROWS, LENGTH, SIZE, VOCAB = 2, 6, 3, 11


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    x, table = random.normal(size=(ROWS, LENGTH, SIZE)), random.normal(size=(VOCAB, SIZE))
    weights = np.array([[1, 1, 0, 2, 1, 1], [1, 0.5, 1, 0, 0, 0]], np.float32)
    return x.astype(np.float32), table.astype(np.float32), random.integers(0, VOCAB, (ROWS, LENGTH)), weights


def logits(table, x):
    return jnp.einsum("BTD,VD->BTV", x, table)


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 6, 50])  # 4 does not divide the length, 50 is more than there is
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_are_those_of_the_whole(batch, num_chunks, weighted):
    x, table, labels, weights = batch
    weights = weights if weighted else None

    def whole(x, table):
        return F.cross_entropy(logits(table, x), labels, weights, label_smoothing=0.1)

    def chunked(x, table):
        output_layer = lambda x: logits(table, x)  # noqa: E731
        return F.chunked_cross_entropy(x, output_layer, labels, weights, label_smoothing=0.1, num_chunks=num_chunks)

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, table) for f in (chunked, whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_any_sums_are_added_up_over_the_chunks(batch):
    x, table, labels, weights = batch

    def sums(logits, labels, weights):
        return {"right": jnp.sum((jnp.argmax(logits, -1) == labels) & (weights > 0)), "z": jnp.sum(logits**2)}

    found = F.chunked_sums(sums, x, lambda x: logits(table, x), labels, weights, num_chunks=4)
    scores = np.einsum("BTD,VD->BTV", x, table)
    assert found["right"] == ((scores.argmax(-1) == labels) & (weights > 0)).sum() > 0
    assert float(found["z"]) == pytest.approx((scores**2).sum(), rel=1e-5)


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf])
def test_what_has_weight_zero_cannot_spoil_a_chunk(batch, wrong):
    x, table, labels, weights = batch
    x[0, 2], labels[0, 2] = wrong, -100

    def loss(x):
        return F.chunked_cross_entropy(x, lambda x: logits(table, x), labels, weights, num_chunks=2)[0]

    value, gradient = jax.value_and_grad(loss)(x)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all() and (gradient[0, 2] == 0).all()


def largest(jaxpr):
    """The size of the largest array of a program, and of all that it calls."""
    sizes = [var.aval.size for equation in jaxpr.eqns for var in equation.outvars]
    for equation in jaxpr.eqns:
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            if isinstance(part, (Jaxpr, ClosedJaxpr)):
                sizes.append(largest(getattr(part, "jaxpr", part)))
    return max(sizes, default=0)


@pytest.mark.parametrize(("most", "expected"), [(10_000, 8), (5_000, 16), (70_000, 1)])
def test_no_more_logits_than_that_are_made_forward_or_backward(monkeypatch, most, expected):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", most)
    rows, length, size, vocab = 4, 32, 5, 512  # 65,536 logits
    x, table = jnp.zeros((rows, length, size)), jnp.zeros((vocab, size))
    labels = jnp.zeros((rows, length), int)

    def loss(x, table):
        return F.chunked_cross_entropy(x, lambda x: logits(table, x), labels)[0]

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, table)
    assert largest(program.jaxpr) == rows * length * vocab // expected


def test_a_device_holds_its_share_of_the_logits(monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 100)
    assert losses._num_chunks(1600) == 16
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)):
        assert losses._num_chunks(1600) == 2
        assert losses._num_chunks(1601) == 4
        assert losses._num_chunks(800) == 1


def test_every_device_has_positions_of_every_chunk():
    """So that where the length is sharded, the hidden states stay where they are."""
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    by_length = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    x = jax.device_put(np.ones((1, 16, 8), np.float32), by_length)
    labels = jax.device_put(np.ones((1, 16), np.int32), by_length)

    def loss(x, labels, table):
        return F.chunked_cross_entropy(x, lambda x: logits(table, x), labels, num_chunks=4)[0]

    program = jax.jit(jax.grad(loss)).lower(x, labels, np.ones((32, 8), np.float32)).compile()
    text = program.as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
