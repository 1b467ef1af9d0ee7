from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from transformer_jax import functional as F
from transformer_jax.functional.dropout import drop_at, salts
from transformer_jax.functional.masks import Block
from transformer_jax.functional.ring import ring_attention

LENGTH = PartitionSpec(None, "ring")


def ring(num_devices, **arguments):
    """`ring_attention` of whole arrays, the lengths over this many devices and all else replicated."""
    mesh = jax.make_mesh((num_devices,), ("ring",), (AxisType.Auto,), devices=jax.devices()[:num_devices])

    def attention(query, key, value, bias=None):
        shard = partial(ring_attention, axis_name="ring", **arguments)
        return jax.shard_map(
            lambda query, key, value, bias: shard(query, key, value, bias=bias),
            mesh=mesh,
            in_specs=(LENGTH, LENGTH, LENGTH, PartitionSpec()),
            out_specs=LENGTH,
            check_vma=False,
        )(query, key, value, bias)

    return attention


def random(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def values_and_gradients(attention, *arrays):
    out, pullback = jax.vjp(attention, *arrays)
    return out, *pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


def test_it_is_the_reference_in_double_precision():
    with jax.enable_x64(True):
        arrays = random((2, 8, 4, 3), (2, 12, 2, 3), (2, 12, 2, 5), (1, 4, 8, 12), dtype=jnp.float64)
        valid = jnp.arange(12)[None] < jnp.array([[12], [7]])
        arguments = {
            "mask": F.causal() & F.padding(valid),
            "dropout_rate": 0.4,
            "dropout_key": jax.random.key(3),
            "scale": 0.7,
        }

        def reference(query, key, value, bias):
            return F.dot_product_attention(query, key, value, bias=bias, **arguments)

        expected = jax.jit(partial(values_and_gradients, reference))(*arrays)
        actual = jax.jit(partial(values_and_gradients, ring(4, **arguments)))(*arrays)
        for given, wanted in zip(actual, expected, strict=True):
            np.testing.assert_allclose(given, wanted, atol=1e-12)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_nothing_is_sent_in_vain(num_devices):
    """Keys and values reach every device in n - 1 steps; in the backward pass their gradients go home in one more."""
    arrays = random(*((1, 8, 1, 2),) * 3)
    attention = ring(num_devices)
    once = num_devices - 1
    assert count_sends(jax.make_jaxpr(attention)(*arrays).jaxpr) == 2 * once
    gradients = jax.make_jaxpr(partial(values_and_gradients, attention))(*arrays)
    assert count_sends(gradients.jaxpr) == 2 * once + 2 * once + 2 * num_devices


def count_sends(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        inner = (getattr(value, "jaxpr", value) for value in jax.tree.leaves(equation.params))
        sends = sum(count_sends(value) for value in inner if hasattr(value, "eqns"))
        total += (equation.primitive.name == "ppermute") + sends * equation.params.get("length", 1)
    return total


def test_the_index_of_dropout_is_modulo_two_to_the_32():
    """The weights are a block of more than fit in memory. With equal scores, what is kept shows in the output."""
    num_queries, num_keys, start = 2**31 + 3, 2**30 + 5, 7
    key = jax.random.split(jax.random.key(0), 1)
    place = {"num_queries": num_queries, "num_keys": num_keys, "dropout_start": jnp.array([start], jnp.uint32)}
    shard = jax.jit(ring(2, dropout_rate=0.5, dropout_key=key, **place))
    out = shard(jnp.zeros((1, 8, 3, 2)), jnp.zeros((1, 8, 3, 2)), jnp.tile(jnp.eye(8)[None, :, None], (1, 1, 3, 1)))
    index = [
        [[((n * num_queries + t) * num_keys + s + start) % 2**32 for s in range(8)] for t in range(8)] for n in range(3)
    ]
    expected = drop_at(jnp.full((1, 3, 8, 8), 1 / 8), salts(key), jnp.array([index], jnp.uint32), 0.5)
    np.testing.assert_allclose(jnp.swapaxes(out, 1, 2), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        F.causal(),
        F.causal(1),
        F.anti_causal(jnp.array([0, 2])),
        F.window(2, 1),
        F.padding(jnp.array([[True] * 7 + [False], [False] * 8])),
        F.segments(jnp.array([[1, 1, 2, 2, 2, 3]]), jnp.array([[1, 1, 1, 2, 2, 2, 3, 3]])),
        F.arbitrary(jax.random.bernoulli(jax.random.key(1), 0.5, (2, 3, 6, 8))),
        F.arbitrary(jax.random.bernoulli(jax.random.key(1), 0.5, (2, 1, 6, 1))) & F.causal() & F.window(3, 3),
    ],
)
def test_blocks_of_a_mask_are_those_of_its_array(mask):
    whole = np.broadcast_to(mask.array(6, 8), (2, 3, 6, 8))
    block = jax.jit(lambda mask, query, key: mask.block(Block(query, 2, key, 4, 6, 8)))
    for query in (0, 2, 4):
        # A shard has its own queries only.
        own = mask.map(lambda x, axes: x[..., query : query + 2, :] if "heads" in axes and x.shape[2] > 1 else x)  # noqa: B023
        own = own.map(lambda x, axes: x[:, query : query + 2] if axes == ("batch", "queries") else x)  # noqa: B023
        for key in (0, 4):
            expected = whole[:, :, query : query + 2, key : key + 4]
            for part in (mask, own):
                actual = np.broadcast_to(block(part, query, key), expected.shape)
                np.testing.assert_array_equal(actual, expected)


def test_a_mask_that_lacks_keys_is_refused():
    """Or the keys of one shard would be masked as those of another."""
    query, key, value = random((1, 4, 1, 2), (1, 8, 1, 2), (1, 8, 1, 2))
    attention = ring(4, mask=F.padding(jnp.ones((1, 2), bool)))
    with pytest.raises(ValueError, match="covers 2 keys, but blocks of 2 need 8; give each shard all keys"):
        attention(query, key, value)
