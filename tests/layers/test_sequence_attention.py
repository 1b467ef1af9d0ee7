import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax import functional as F
from transformer_jax.errors import UserError
from transformer_jax.layers.sequence_attention import sequence_attention, shards_sequence
from transformer_jax.parallel.axes import Rules, axis_rules


def mesh_of(devices=None, **sizes):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices() if devices is None else devices)[:count].reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


ROWS = {"data": 2, "sequence": 4}
ALONE = {"sequence": 8}
HEADS = {"data": 2, "sequence": 2, "tensor": 2}
ROW_KEYS = jax.random.split(jax.random.key(5), 2)
SEGMENTS = jnp.arange(14).reshape(2, 7) // 3


def random(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def some(*shape, probability=0.5):
    return jax.random.bernoulli(jax.random.key(7), probability, shape)


def run(attention, arrays, bias, mask=None, dropout_key=None, *, mesh=None, **arguments):
    """Output, and the gradients of query, key, value and bias for an arbitrary cotangent."""

    @jax.jit
    def compute(arrays, bias, mask, dropout_key):
        def apply(arrays, bias):
            return attention(*arrays, bias=bias, mask=mask, dropout_key=dropout_key, **arguments)

        out, pullback = jax.vjp(apply, arrays, bias)
        return out, *pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    with jax.set_mesh(mesh or mesh_of(data=1)):
        return jax.tree.leaves(jax.device_get(compute(arrays, bias, mask, dropout_key)))


@pytest.mark.parametrize(
    ("mesh", "lengths", "key_heads", "bias", "arguments"),
    [
        (ROWS, (8, 8), 4, None, {"mask": F.causal()}),
        (ROWS, (6, 13), 2, (1, 4, 6, 13), {"mask": F.causal() & F.window(4, 0)}),
        (ROWS, (8, 13), 1, (2, 1, 8, 1), {"mask": F.anti_causal(), "scale": 1.0}),
        (ROWS, (5, 8), 2, None, {"mask": F.padding(jnp.arange(8)[None] < jnp.array([[5], [0]]))}),
        (ROWS, (5, 7), 2, None, {"mask": F.segments(jnp.arange(10).reshape(2, 5) // 2, SEGMENTS)}),
        (ALONE, (1, 9), 2, (1, 4, 1, 9), {"mask": F.causal(jnp.array([3, 6]))}),
        (ALONE, (7, 13), 4, (1, 1, 1, 13), {"mask": some(2, 4, 7, 13), "dropout_rate": 0.3, "dropout_key": ROW_KEYS}),
        (ALONE, (2, 1), 4, (2, 4, 2, 1), {"mask": F.padding(jnp.array([[True], [False]]))}),
        (HEADS, (7, 5), 1, (1, 4, 7, 5), {"mask": F.window(2, 1), "dropout_rate": 0.3, "dropout_key": ROW_KEYS}),
        (HEADS, (7, 5), 4, (2, 4, 7, 5), {"mask": some(1, 4, 7, 5), "dropout_rate": 0.3, "dropout_key": ROW_KEYS[0]}),
        ({"sequence": 2, "tensor": 4}, (4, 6), 2, None, {"dropout_rate": 0.3, "dropout_key": ROW_KEYS[:1]}),
        (
            HEADS,
            (7, 7),
            2,
            (1, 4, 7, 7),
            {"mask": F.causal() & F.segments(SEGMENTS) & some(2, 1, 1, 7, probability=0.8)},
        ),
    ],
)  # fmt: skip
def test_it_is_the_reference_on_every_mesh(mesh, lengths, key_heads, bias, arguments):
    num_queries, num_keys = lengths
    *arrays, bias_array = random(
        (2, num_queries, 4, 3), (2, num_keys, key_heads, 3), (2, num_keys, key_heads, 5), bias or (1,)
    )
    bias_array = None if bias is None else bias_array
    expected = run(F.dot_product_attention, arrays, bias_array, **arguments)
    actual = run(sequence_attention, arrays, bias_array, mesh=mesh_of(**mesh), **arguments)
    assert len(actual) == len(expected) == 4 + (bias is not None)
    for given, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5 * max(1, np.abs(wanted).max()))


def test_the_order_of_the_devices_does_not_matter():
    arrays = random(*((2, 7, 2, 4),) * 3)
    devices = [jax.devices()[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    results = [
        run(sequence_attention, arrays, None, F.causal(), mesh=mesh_of(order, **ROWS))
        for order in (jax.devices(), devices)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_rows_and_heads_that_do_not_divide_are_computed_too():
    arrays = random(*((3, 4, 3, 4),) * 3)
    arguments = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    expected = run(F.dot_product_attention, arrays, None, **arguments)
    actual = run(sequence_attention, arrays, None, mesh=mesh_of(**HEADS), **arguments)
    for given, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(given, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_query_that_may_see_nothing_gives_exact_zeros(dtype):
    arrays = [30 * x for x in random(*((2, 8, 2, 4),) * 3, dtype=dtype)]
    mask = F.causal() & F.arbitrary(jnp.ones((1, 1, 8, 8), bool).at[0, 0, 3].set(False))

    @jax.jit
    def compute(*arrays):
        out, pullback = jax.vjp(lambda *arrays: sequence_attention(*arrays, mask=mask), *arrays)
        return out, pullback(jnp.zeros_like(out).at[:, 3].set(1)), pullback(jnp.ones_like(out))

    with jax.set_mesh(mesh_of(**ROWS)):
        out, from_that_query, from_all = compute(*arrays)
    np.testing.assert_array_equal(out[:, 3], 0)
    assert all(bool((gradient == 0).all()) for gradient in from_that_query)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in (out, *from_all))
    assert all(gradient.dtype == dtype and bool((gradient != 0).any()) for gradient in (out, *from_all))


def test_bfloat16_is_float32_rounded():
    arrays = random(*((2, 16, 2, 8),) * 3, dtype=jnp.bfloat16)
    bias = random((1, 2, 16, 16))[0]
    expected = run(F.dot_product_attention, [x.astype(jnp.float32) for x in arrays], bias, F.causal())
    actual = run(sequence_attention, arrays, bias, F.causal(), mesh=mesh_of(**ROWS))
    assert [x.dtype for x in actual] == [jnp.bfloat16] * 4 + [jnp.float32]
    for given, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(given.astype(np.float32), wanted, atol=0.015 * np.abs(wanted).max())


def test_the_scores_of_bfloat16_are_float32():
    """A value of ones and zeros shows the weights themselves, in float32."""
    query, key = random((1, 8, 2, 3), (1, 8, 2, 3), dtype=jnp.bfloat16)
    value = jnp.tile(jnp.eye(8)[None, :, None], (1, 1, 2, 1))
    with jax.set_mesh(mesh_of(**ROWS)):
        weights = jax.jit(sequence_attention)(query, key, value)
    scores = np.einsum("BTNH,BSNH->BTNS", *(np.asarray(x, np.float64) for x in (query, key))) / np.sqrt(3)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(weights, powers / powers.sum(-1, keepdims=True), rtol=1e-5)


def test_gradients_on_their_way_round_the_ring_are_float32():
    """With equal weights, the gradient of a value is a mean; in bfloat16, 1 + 0.003 is 1 however often it is added."""
    query, key, value = jnp.zeros((3, 1, 8, 1, 2), jnp.bfloat16)
    gradient = jnp.full((1, 8, 1, 2), 0.003, jnp.bfloat16).at[:, 0].set(1)

    @jax.jit
    def pull_back(value):
        return jax.vjp(lambda value: sequence_attention(query, key, value), value)[1](gradient)[0]

    with jax.set_mesh(mesh_of(**ALONE)):
        actual = pull_back(value)
    expected = jnp.mean(gradient.astype(jnp.float32), 1, keepdims=True).astype(jnp.bfloat16)
    np.testing.assert_array_equal(actual, jnp.broadcast_to(expected, value.shape))


def test_inside_scan_and_checkpoint():
    def loss(attention):
        def layer(x, weight):
            projected = jnp.einsum("BTNH,HE->BTNE", x, weight)
            return x + attention(projected, x, x, mask=F.causal()), None

        return lambda weights, x: jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, weights)[0]))

    with jax.enable_x64(True):
        weights, x = random((3, 4, 4), (2, 7, 2, 4), dtype=jnp.float64)
        expected = jax.jit(jax.value_and_grad(loss(F.dot_product_attention)))(weights, x)
        with jax.set_mesh(mesh_of(**ROWS)):
            actual = jax.jit(jax.value_and_grad(loss(sequence_attention)))(weights, x)
    for given, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-12)


def compiled_gradient(num_queries, mask, **sizes):
    mesh = mesh_of(**sizes)
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    array = jax.ShapeDtypeStruct((2, num_queries, 2, 4), jnp.float32, sharding=sharding)

    def loss(*arrays):
        return jnp.sum(sequence_attention(*arrays, mask=mask) ** 2)

    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(array, array, array).compile()


def test_keys_and_values_go_from_device_to_device_and_are_never_gathered():
    mask = F.causal() & F.padding(some(2, 16))
    text = compiled_gradient(16, mask, sequence=8).as_text()
    operations = set(re.findall(r" (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text))
    assert operations == {"collective-permute", "all-reduce"}  # the sum of the loss is the one reduction


def test_a_device_has_one_block_of_the_scores_at_a_time():
    """A 64th of them: the queries and the keys are both an eighth. What else there is takes a little more."""
    alone, shared = (
        compiled_gradient(1024, F.causal(), sequence=count).memory_analysis().temp_size_in_bytes for count in (1, 8)
    )
    assert shared < alone / 32


def test_whether_sequences_are_sharded():
    assert not shards_sequence()
    for sizes, expected in ((ROWS, True), ({"data": 4, "tensor": 2}, False), ({"data": 8, "sequence": 1}, False)):
        mesh = mesh_of(**sizes)
        seen = []

        def look(x, seen=seen):
            seen.append(shards_sequence())
            return x

        with jax.set_mesh(mesh):
            assert shards_sequence() is expected
            jax.jit(look)(jnp.zeros(8))
            jax.jit(jax.shard_map(look, in_specs=PartitionSpec(), out_specs=PartitionSpec()))(jnp.zeros(8))
        jax.pmap(look)(jnp.zeros((8, 1)))
        assert seen[0] is expected and not any(seen[1:]) and len(seen) >= 3
    with jax.set_mesh(mesh_of(**ROWS)), axis_rules(Rules(length=())):
        assert not shards_sequence()


def test_mistakes_are_named():
    query, key, value = random((1, 4, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4))
    with pytest.raises(UserError, match="needs a mesh axis for the length; the mesh has no axes"):
        sequence_attention(query, key, value)
    with jax.set_mesh(mesh_of(data=8)), pytest.raises(UserError, match="for the length; the mesh has data; set a mesh"):
        sequence_attention(query, key, value)
    with jax.set_mesh(mesh_of(**ALONE)):
        with pytest.raises(ValueError, match="a mask or bias covers 4 keys but there are 8"):
            sequence_attention(query, key, value, mask=F.padding(jnp.ones((1, 4), bool)))
        with pytest.raises(ValueError, match="a mask or bias covers 3 heads but there are 2"):
            sequence_attention(query, key, value, bias=jnp.zeros((1, 3, 4, 8)))
        with pytest.raises(ValueError, match="dropout rate must be at least 0 and below 1; got 1"):
            sequence_attention(query, key, value, dropout_rate=1.0, dropout_key=jax.random.key(0))
