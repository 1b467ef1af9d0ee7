"""Matrix products counted in the jaxpr: closed forms, and what XLA counts in a train step that it has compiled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from transformer_jax.models import (
    BertConfig,
    GPTConfig,
    T5Config,
    TransformerConfig,
    XLNetConfig,
)
from transformer_jax.parallel.flops import matmul_flops, train_flops


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


M, K, N = 3, 5, 7
ONE = 2 * M * K * N  # FLOPs of one product of M x K and K x N
X, W = array(M, K), array(K, N)


def square(x):
    return x @ x


def test_one_product_and_a_batch_of_them():
    assert matmul_flops(jnp.matmul, X, W) == ONE
    assert matmul_flops(lambda x, w: jnp.einsum("BMK,BKN->BMN", x, w), array(4, M, K), array(4, K, N)) == 4 * ONE
    assert matmul_flops(lambda x: jnp.sin(x) * 2, X) == 0


def test_a_scan_counts_as_often_as_it_runs():
    def looped(x):
        return jax.lax.scan(lambda x, _: (jax.lax.fori_loop(0, 3, lambda _, x: square(x), x), None), x, length=4)[0]

    assert matmul_flops(looped, array(K, K)) == 4 * 3 * 2 * K**3


@jax.custom_jvp
def with_jvp(x):
    return square(x)


@jax.custom_vjp
def with_vjp(x):
    return square(x)


with_jvp.defjvps(lambda tangent, _, x: tangent @ x + x @ tangent)
with_vjp.defvjp(lambda x: (square(x), x), lambda x, y: (y @ x.T + x.T @ y,))


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (jax.jit(square), 1),
        (jax.checkpoint(square), 1),
        (with_jvp, 1),
        (with_vjp, 1),
        (lambda x: jax.lax.cond(x[0, 0] > 0, square, lambda x: square(square(x)), x), 2),  # the more expensive branch
        (lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x - 1, square(x)), 1),
        (jax.grad(lambda x: with_vjp(x).sum()), 3),
    ],
    ids=["jit", "checkpoint", "custom_jvp", "custom_vjp", "cond", "while", "gradient"],
)
def test_inside_other_functions(function, times):
    assert matmul_flops(function, array(K, K)) == times * 2 * K**3


def test_a_while_loop_with_a_product_is_an_error():
    with pytest.raises(ValueError, match="while_loop has matrix products"):
        matmul_flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, square, x), array(K, K))


def test_shard_map_counts_what_all_devices_do():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def sharded(x, w):
        rows, columns = PartitionSpec("data"), PartitionSpec(None, "tensor")
        specs = {"in_specs": (rows, columns), "out_specs": PartitionSpec("data", "tensor")}
        return jax.shard_map(jnp.matmul, mesh=mesh, **specs)(x, w)

    assert matmul_flops(sharded, array(6, K), array(K, 8)) == 2 * 6 * K * 8


def test_a_pallas_kernel_counts_for_its_whole_grid():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def blocked(x, w):
        return pl.pallas_call(
            kernel,
            grid=(2, 3),
            in_specs=[pl.BlockSpec((4, 8), lambda i, j: (i, 0)), pl.BlockSpec((8, 2), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((4, 2), lambda i, j: (i, j)),
            out_shape=array(8, 6),
        )(x, w)

    assert matmul_flops(blocked, array(8, 8), array(8, 6)) == 2 * 8 * 8 * 6


def test_a_convolution_and_its_gradients():
    """Each of 2 x 5 outputs of 6 channels sees 3 places of the 2 channels of its group, of 4 in all."""

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", feature_group_count=2, dimension_numbers=("NWC", "WIO", "NWC")
        )

    arguments = array(2, 5, 4), array(3, 2, 6)
    forward = 2 * (2 * 5 * 6) * (3 * 2)
    assert matmul_flops(convolve, *arguments) == forward
    both = jax.grad(lambda *args: convolve(*args).sum(), argnums=(0, 1))
    assert matmul_flops(both, *arguments) == train_flops(convolve, *arguments) == 3 * forward


def test_rows_in_groups_are_multiplied_once_and_so_are_their_gradients():
    arguments = array(8, K), array(2, K, N), array(2, dtype=jnp.int32)
    forward = 2 * 8 * K * N
    assert matmul_flops(jax.lax.ragged_dot, *arguments) == forward
    both = jax.value_and_grad(lambda *args: jax.lax.ragged_dot(*args).sum(), argnums=(0, 1))
    assert matmul_flops(both, *arguments) == 3 * forward


ROWS, LENGTH, VOCAB, D, FF, LAYERS = 2, 32, 1000, 512, 2048, 2
SIZES = {"d_model": D, "num_heads": 8, "d_ff": FF, "unroll": LAYERS, "dtype": "float32"}
STACK, STACKS = {"num_layers": LAYERS}, {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS}
CONFIGS = {
    "transformer": replace(TransformerConfig.base(VOCAB), **SIZES, **STACKS),
    "gpt": replace(GPTConfig.small(VOCAB), **SIZES, **STACK),
    "bert": replace(BertConfig.base(VOCAB), **SIZES, **STACK),
    "t5": replace(T5Config.small(VOCAB), **SIZES, **STACKS),
    "xlnet": replace(XLNetConfig.base(VOCAB), **SIZES, **STACK),
}
OUTPUTS = {
    "transformer": lambda model, ids: model(ids, ids),
    "gpt": lambda model, ids: model(ids),
    "bert": lambda model, ids: model.masked_lm(model(ids)),
    "t5": lambda model, ids: model(ids, ids),
    "xlnet": lambda model, ids: model.predict(ids, ids, allowed=jnp.ones((ROWS, LENGTH, LENGTH), bool)),
}


def train(name, **settings):
    config = replace(CONFIGS[name], **settings)
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    return lambda model, ids: OUTPUTS[name](model, ids).sum(), (model, array(ROWS, LENGTH, dtype=jnp.int32))


@pytest.mark.parametrize("name", CONFIGS)
def test_model_flops_are_what_xla_counts_in_a_step_whose_layers_are_unrolled(name):
    loss, arguments = train(name)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
    assert compiled.cost_analysis()["flops"] == pytest.approx(train_flops(loss, *arguments), rel=0.02)


def test_the_closed_form_of_a_decoder_scanned_and_unrolled():
    """Per token 8 d^2 for the projections, 4 d d_ff for the feed-forward, 4 T d for attention, 2 d V for the logits."""
    layer = 8 * D**2 + 4 * D * FF + 4 * LENGTH * D
    expected = ROWS * LENGTH * (LAYERS * layer + 2 * D * VOCAB)
    for settings in ({"unroll": 1}, {"unroll": LAYERS}, {"rematerialize": "full"}):
        loss, arguments = train("gpt", **settings)
        assert matmul_flops(loss, *arguments) == expected, settings
