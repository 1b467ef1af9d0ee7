"""Collectives of programs in which they are known by hand, and of the forms in which compilers write them."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer_jax.parallel.collectives import Collective, Traffic, collectives, summarize
from transformer_jax.parallel.topology import ENVIRONMENT, tpu_devices

D, LAYERS = 16, 5


def mesh_of(devices):
    return Mesh(np.array(devices).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def compiled_text(function, mesh, *arguments, dtype=jnp.float32):
    """The program of a function of (shape, partition) arguments."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    return jax.jit(function).lower(*arrays).compile().as_text()


def fsdp_loss(mesh):
    """A loss of layers whose weights are gathered one by one, while the batch stays where it is."""

    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P(("data", "fsdp")))), None

    return lambda weights, x: jax.lax.scan(layer, x, weights)[0].sum()


FSDP = ((LAYERS, D, D), P(None, "fsdp")), ((8 * D, D), P(("data", "fsdp")))


def test_each_kind_on_eight_devices():
    mesh = mesh_of(jax.devices())

    def program(x):  # 32 x 8 floats on each of 8 devices: 1,024 bytes
        return (
            jax.lax.psum(x, ("data", "fsdp")),
            jax.lax.all_gather(x, "fsdp", tiled=True),
            jax.lax.psum_scatter(x, "fsdp", tiled=True),
            jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
            jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        )

    spec = P(("data", "fsdp"))
    sharded = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=(P(), *[spec] * 4), check_vma=False)
    found = collectives(compiled_text(sharded, mesh, ((8 * 32, 8), spec)))
    assert {(one.kind, one.size, one.group_size, one.runs, one.bytes_moved) for one in found} == {
        ("all-reduce", 1024, 8, 1, 2 * 7 / 8 * 1024),
        ("all-gather", 4096, 4, 1, 3 / 4 * 4096),
        ("reduce-scatter", 1024, 4, 1, 3 / 4 * 1024),
        ("all-to-all", 1024, 4, 1, 3 / 4 * 1024),
        ("collective-permute", 1024, 8, 1, 1024),
    }
    assert {one.kind: one.op_name.split("/")[-1] for one in found}["all-reduce"] == "psum"


def test_weights_that_are_gathered_in_a_scan_are_gathered_in_every_layer():
    mesh = mesh_of(jax.devices())
    found = collectives(compiled_text(fsdp_loss(mesh), mesh, *FSDP))
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.size, one.group_size, one.runs, one.is_exact) for one in gathers] == [(4 * D * D, 4, LAYERS, True)]
    assert "while/body" in gathers[0].op_name
    assert summarize(found)["all-gather"] == Traffic(LAYERS, LAYERS * 4 * D * D * 3 / 4)
    assert summarize(found)["all-reduce"].count == 1  # of the loss


def test_loops_in_loops_multiply_and_one_of_unknown_length_counts_once():
    mesh = mesh_of(jax.devices())

    def inner(x, _):
        return jax.lax.psum(x, "fsdp"), None

    def outer(x, _):
        return jax.lax.scan(inner, x, length=3)[0], None

    def program(x):
        x, _ = jax.lax.scan(outer, x, length=4)
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jax.lax.psum(x + 1, "data"), x)

    sharded = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = collectives(compiled_text(sharded, mesh, ((8, 8), P())))
    assert {(one.group_size, one.runs, one.is_exact) for one in found} == {(4, 12, True), (2, 1, False)}


HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"


def entry(*instructions):
    return HEADER + "ENTRY %main (x: f32[4]) -> f32[4] {\n  " + "\n  ".join(instructions) + "\n}\n"


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("{}", 8),
        ("mesh['a'=4,'b'=2] {'b'}", 2),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a','c'}", 8),
        ("mesh['a'=8] {'a':(2)2}", 2),
    ],
)
def test_the_forms_of_replica_groups(groups, size):
    text = entry(f"%r = bf16[4,2]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert collectives(text) == [Collective("all-reduce", 16, size, 1, True, "")]


@pytest.mark.parametrize(
    ("instructions", "kind", "size"),
    [
        (
            ("%r = (f32[4]{0}, bf16[6]{0}, pred[3]{0}) all-reduce(%x, %y, %z), to_apply=%add",),
            "all-reduce",
            16 + 12 + 3,
        ),
        (("%s = f32[4]{0} all-reduce-start(%x)", "%d = f32[4]{0} all-reduce-done(%s)"), "all-reduce", 16),
        (
            ("%s = (f32[4]{0}, f32[32]{0}) all-gather-start(%x)", "%d = f32[32]{0} all-gather-done(%s)"),
            "all-gather",
            128,
        ),
        (
            ("%s = ((f32[32]{0}), f32[4]{0}, u32[]{:S(2)}) reduce-scatter-start(%x)", "%d = f32[4]{0} custom-call(%s)"),
            "reduce-scatter",
            128,
        ),
        (
            (
                "%s = (f32[4]{0:T(128)}, f32[4]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)",
                "%d = f32[4]{0} collective-permute-done(%s)",
            ),
            "collective-permute",
            16,
        ),
        (
            (
                "%s = (f32[4]{0}, u32[], token[]) send(%x, %after), is_host_transfer=true",
                "%d = token[] send-done(%s), is_host_transfer=true",
            ),
            "send",
            16,
        ),
    ],
)
def test_several_arrays_at_once_and_what_is_split_in_start_and_done(instructions, kind, size):
    assert collectives(entry(*instructions)) == [Collective(kind, size, 8, 1, True, "")]


def test_an_asynchronous_wrapper_is_one_collective_that_has_the_name_of_its_start():
    wrapped = "%wrapped (x: f32[4]) -> f32[32] {\n  ROOT %g = f32[32]{0} all-gather(%x), dimensions={0}\n}\n\n"
    start = '%s = ((f32[4]{0}), f32[32]{0}) async-start(%x), calls=%wrapped, metadata={op_name="jit(f)/gather"}'
    text = entry(start, "%d = f32[32]{0} async-done(%s), calls=%wrapped").replace(HEADER, HEADER + wrapped)
    assert collectives(text) == [Collective("all-gather", 128, 8, 1, True, "jit(f)/gather")]


TPU = """HloModule jit_step, num_partitions=8

%start (p: f32[4]) -> (f32[4], f32[32]) {
  %g.1 = f32[32]{0:T(128)} all-gather(%p), channel_id=9, backend_config={"async_collective_fusion_config":{"a":"-1"}}
  ROOT %c = (f32[4]{0}, f32[32]{0:S(1)}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%beside (p: f32[4]) -> f32[32] {
  %g.2 = f32[32]{0:T(128)} all-gather(%p), channel_id=9, backend_config={"async_collective_fusion_config":{"a":"2"}}
}

%all-reduce-scatter.1 (p: f32[32]) -> f32[4] {
  %r = f32[32]{0:T(128)} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %k = f32[4]{0:T(128)} dynamic-slice(%r, %i), dynamic_slice_sizes={4}
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (f32[4]{0}, f32[32]{0:S(1)}) fusion(%x), kind=kCustom, calls=%start
  %b = f32[32]{0} fusion(%x), kind=kOutput, calls=%beside
  %f = f32[4]{0:T(128)} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/scatter"}
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%n, %limit), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %one = s32[]{:T(128)} constant(1)
  %copy = s32[]{:T(128)} copy(%one)
  %t = (s32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%copy, %x)
  %w = (s32[]{:T(128)}, f32[4]{0:T(128)}) while(%t), condition=%condition, body=%body
}
"""


def test_a_program_as_the_tpu_compiler_writes_it():
    """The loop begins with 1 and ends before 6; the gather is spread over two fusions of it."""
    assert collectives(TPU) == [
        Collective("all-gather", 128, 8, 5, True, ""),
        Collective("reduce-scatter", 128, 4, 5, True, "jit(step)/scatter"),
    ]
    assert {one.runs for one in collectives(TPU.replace("direction=LT", "direction=NE"))} == {1}


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_tpu_compiler_gathers_in_every_layer_forward_and_backward_and_scatters_the_gradients(monkeypatch):
    for name, value in {**ENVIRONMENT, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        monkeypatch.setenv(name, value)
    mesh = mesh_of(tpu_devices("v5e:2x4"))
    size = 512  # smaller ones are written in other ways

    def step(weights, x):
        gradient = jax.grad(fsdp_loss(mesh))(weights, x)
        return jax.lax.with_sharding_constraint(gradient, NamedSharding(mesh, P(None, "fsdp")))

    weights, x = ((LAYERS, size, size), P(None, "fsdp")), ((8 * 64, size), P(("data", "fsdp")))
    found = collectives(compiled_text(step, mesh, weights, x, dtype=jnp.bfloat16))
    layer = 2 * size * size
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.size, one.group_size, one.runs, one.is_exact) for one in gathers] == [(layer, 4, LAYERS, True)] * 2
    assert summarize(found)["reduce-scatter"] == Traffic(LAYERS, LAYERS * layer * 3 / 4)
    assert summarize(found)["all-reduce"] == Traffic(LAYERS, LAYERS * layer / 4)  # the shards of two data replicas
