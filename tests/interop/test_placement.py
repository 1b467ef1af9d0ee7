"""The dtype and the sharding that weights are loaded with, and how much of them the host holds meanwhile."""

import tracemalloc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.interop.checkpoints import assert_same_weights, changed, loaded, tensor_of
from tests.reference import REFERENCES
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained, save_pretrained
from transformer_jax.layers import named_parameters
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.parallel import parameter_sharding

ONE_OF_EACH = ["bert_masked_lm", "gpt2_lm", "llama_grouped", "t5_v1_0", "xlnet_lm", "marian_shared"]
IDS = np.arange(10, 18).reshape(2, 4)


def mesh(shape: tuple[int, ...] = (2, 2, 2), names: tuple[str, ...] = ("data", "fsdp", "tensor")) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def outputs(name: str, pretrained) -> np.ndarray:
    return np.asarray(pretrained(IDS, IDS) if name in ("t5_v1_0", "marian_shared") else pretrained(IDS), np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.float16, np.dtype("float16"), "float32", None])
@pytest.mark.parametrize("name", ["gpt2_lm", "bert_bfloat16", "t5_bin"])
def test_weights_are_as_if_cast_afterwards(name, dtype):
    expected = jnp.dtype("float32" if dtype is None else dtype)
    cast = jax.tree.map(lambda leaf: leaf.astype(expected), loaded(name).model)
    model = from_pretrained(REFERENCES[name].folder, dtype=dtype).model
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {expected}
    assert_same_weights(model, cast)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_in_16_bits_a_model_computes_nearly_the_same(name):
    expected = outputs(name, loaded(name))
    found = outputs(name, from_pretrained(REFERENCES[name].folder, dtype="bfloat16"))
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e5m2", "brain", object()])
def test_another_dtype_is_an_error(dtype):
    with pytest.raises(ValueError, match=r"^dtype=.* cannot be .*; give one of float32, bfloat16, float16\Z"):
        from_pretrained(REFERENCES["gpt2_lm"].folder, dtype=dtype)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, "float16"), (3.4e38, "bfloat16")])
def test_a_weight_that_the_dtype_cannot_hold_is_named(tmp_path, value, dtype):
    table = tensor_of("gpt2_lm", "transformer.wte.weight").copy()
    table[3, 5] = value
    folder = changed(tmp_path, "gpt2_lm", {"transformer.wte.weight": table})
    assert from_pretrained(folder).model.embedding.table[3, 5] == np.float32(value)
    message = rf"wte.weight has 1 values that are NaN, infinite or too large for {dtype}; .*, or load it in float32,"
    with pytest.raises(UserError, match=message):
        from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_on_a_mesh_each_weight_is_laid_out_by_its_axes(name):
    pretrained = from_pretrained(REFERENCES[name].folder, sharding=mesh())
    for path, parameter in named_parameters(pretrained.model).items():
        assert parameter[...].sharding == parameter_sharding(parameter, mesh()), path
    table = pretrained.model.embedding.table[...]
    assert table.sharding.spec == PartitionSpec("tensor", "fsdp")
    num_ids, size = table.shape
    assert {shard.data.shape for shard in table.addressable_shards} == {(num_ids // 2, size // 2)}
    assert_same_weights(pretrained.model, loaded(name).model)
    np.testing.assert_allclose(outputs(name, pretrained), outputs(name, loaded(name)), atol=1e-5)


def test_a_mesh_as_jax_makes_it_by_default_will_do():
    pretrained = from_pretrained(REFERENCES["gpt2_lm"].folder, sharding=jax.make_mesh((4, 2), ("fsdp", "tensor")))
    np.testing.assert_allclose(outputs("gpt2_lm", pretrained), outputs("gpt2_lm", loaded("gpt2_lm")), atol=1e-5)


@pytest.mark.parametrize("kind", ["replicated", "one device"])
def test_one_sharding_is_that_of_every_weight(kind):
    last = SingleDeviceSharding(jax.devices()[-1])
    sharding = NamedSharding(mesh(), PartitionSpec()) if kind == "replicated" else last
    pretrained = from_pretrained(REFERENCES["gpt2_lm"].folder, sharding=sharding, dtype="bfloat16")
    for leaf in jax.tree.leaves(pretrained.model):
        assert leaf.sharding == sharding and leaf.is_fully_replicated and leaf.dtype == jnp.bfloat16
    expected = from_pretrained(REFERENCES["gpt2_lm"].folder, dtype="bfloat16")
    np.testing.assert_allclose(outputs("gpt2_lm", pretrained), outputs("gpt2_lm", expected), atol=1e-5)


def test_without_a_sharding_weights_are_on_the_default_device():
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded("gpt2_lm").model))
    with jax.default_device(jax.devices()[3]):
        model = from_pretrained(REFERENCES["gpt2_lm"].folder).model
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(model))


def test_what_is_sharded_is_saved_like_what_is_not(tmp_path):
    save_pretrained(from_pretrained(REFERENCES["gpt2_lm"].folder, sharding=mesh()).model, tmp_path)
    assert_same_weights(from_pretrained(tmp_path).model, loaded("gpt2_lm").model)


@pytest.mark.parametrize(
    ("sharding", "error", "message"),
    [
        (
            mesh((4,), ("tensor",)),
            ValueError,
            r"^decoder.blocks.feed_forward.input.bias: ff=10 does not divide over the mesh axis tensor=4; .* or use",
        ),
        (
            NamedSharding(mesh((8,), ("data",)), PartitionSpec("data")),
            ValueError,
            r"^decoder.blocks.feed_forward.input.bias has shape \(2, 10\), which does not fit NamedSharding.*; give a",
        ),
        (PartitionSpec("data"), TypeError, r"^sharding=.*'data'.* is not a jax.sharding.Sharding"),
        ("tensor", TypeError, r"^sharding='tensor' is not a jax.sharding.Sharding"),
    ],
)
def test_a_sharding_that_does_not_fit_is_an_error_before_anything_is_read(monkeypatch, sharding, error, message):
    monkeypatch.setattr("transformer_jax.interop.tensor.Tensor.read", lambda tensor: pytest.fail("read"))
    with pytest.raises(error, match=message):
        from_pretrained(REFERENCES["gpt2_lm"].folder, sharding=sharding)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A table of 4 MB in bfloat16, and 4 layers with two weights of 2 MB each, stacked."""
    config = replace(
        GPTConfig.small(vocab_size=16_384), d_model=128, num_heads=4, d_ff=2048, num_layers=4, max_length=16
    )
    folder = tmp_path_factory.mktemp("large")
    save_pretrained(GPT(config, rngs=nnx.Rngs(0)), folder)
    return folder


@pytest.mark.parametrize("on_mesh", [False, True])
def test_the_host_holds_one_weight_at_a_time(large, monkeypatch, on_mesh):
    """Stand-ins of the devices' arrays, since those of the CPU may be the arrays of the host themselves."""
    alive, most, sizes = set(), 0, []

    def received(array: np.ndarray) -> jax.Array:
        nonlocal most
        owner = array if array.base is None else array.base
        alive.add(id(owner))
        weakref.finalize(owner, alive.discard, id(owner))
        most = max(most, len(alive))
        sizes.append(array.nbytes)
        return jnp.zeros(array.shape, array.dtype)

    def whole(shape, sharding, callback):
        return received(callback((slice(None),) * len(shape)))

    monkeypatch.setattr(jax, "device_put", received)
    monkeypatch.setattr(jax, "make_array_from_callback", whole)
    tracemalloc.start()
    try:
        from_pretrained(large, dtype="bfloat16", sharding=mesh() if on_mesh else None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most == 1 and not alive
    assert sum(sizes) > 2 * max(sizes) and max(sizes) == 16_384 * 128 * 2
    assert max(sizes) < peak < 1.3 * max(sizes)  # so that there is no float32 copy of the table either
