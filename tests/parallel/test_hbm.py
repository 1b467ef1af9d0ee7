"""Bytes that programs move, where they can be counted by hand."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.parallel.hbm import memory_traffic
from transformer_jax.parallel.topology import ENVIRONMENT, tpu_devices

PROGRAM = """HloModule step

%nested (p: f32[6,4]) -> f32[4] {
  %p = f32[6,4]{1,0} parameter(0)
  %i.0 = s32[] constant(0)
  %slice = f32[1,4]{1,0} dynamic-slice(%p, %i.0, %i.0), dynamic_slice_sizes={1,4}
  ROOT %flat = f32[4]{0} bitcast(%slice)
}

%fused (stack: f32[6,4], x: f32[4], saved: f32[6,4]) -> (f32[4], f32[6,4]) {
  %stack = f32[6,4]{1,0} parameter(0)
  %x.1 = f32[4]{0} parameter(1)
  %saved = f32[6,4]{1,0} parameter(2)
  %layer = f32[4]{0} fusion(%stack), kind=kLoop, calls=%nested
  %y = f32[4]{0} multiply(%layer, %x.1)
  %row = f32[1,4]{1,0} bitcast(%x.1)
  %i.1 = s32[] constant(0)
  %updated = f32[6,4]{1,0} dynamic-update-slice(%saved, %row, %i.1, %i.1)
  ROOT %both = (f32[4]{0}, f32[6,4]{1,0}) tuple(%y, %updated)
}

%body (state: (s32[], f32[4], f32[6,4], f32[6,4])) -> (s32[], f32[4], f32[6,4], f32[6,4]) {
  %state = (s32[], f32[4]{0}, f32[6,4]{1,0}, f32[6,4]{1,0}) parameter(0)
  %x.2 = f32[4]{0} get-tuple-element(%state), index=1
  %weights = f32[6,4]{1,0} get-tuple-element(%state), index=2
  %kept = f32[6,4]{1,0} get-tuple-element(%state), index=3
  %step = (f32[4]{0}, f32[6,4]{1,0}) fusion(%weights, %x.2, %kept), kind=kLoop, calls=%fused
}

%condition (state: (s32[], f32[4], f32[6,4], f32[6,4])) -> pred[] {
  %never = pred[] constant(false)
}

ENTRY %main (a: f32[4], w: f32[6,4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %w = f32[6,4]{1,0} parameter(1)
  %start = (f32[4]{0:S(1)}, f32[4]{0}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[4]{0:S(1)} copy-done(%start)
  %room = f32[6,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %t = (s32[], f32[4]{0}, f32[6,4]{1,0}, f32[6,4]{1,0}) tuple(%zero, %a, %w, %room)
  %loop = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %sum = f32[4]{0} add(%a, %done)
}
"""


def test_a_loop_reads_a_layer_and_writes_a_row_each_time():
    """In each of 6 iterations: a slice of w and x are read, y and a row are written. Then a is copied, read, and the
    sum is written; what is in the vector memory costs nothing."""
    row = 4 * 4
    assert memory_traffic(PROGRAM) == 6 * (row + row + row + row) + row + (row + row)


def test_an_elementwise_function_reads_and_writes_once():
    text = jax.jit(lambda x: jnp.sin(x) * 2 + x).lower(jnp.ones((64, 64))).compile().as_text()
    assert memory_traffic(text) == 2 * 4 * 64 * 64


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_the_tpu_compiler_reads_each_layer_once_and_writes_what_it_saves(monkeypatch):
    """Six matrices that are multiplied into x, which stays in the vector memory; each x is kept."""
    for name, value in {**ENVIRONMENT, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        monkeypatch.setenv(name, value)
    whole = NamedSharding(Mesh(np.array(tpu_devices("v5e:1x1")), "data"), PartitionSpec())
    size, layers = 1024, 6

    def program(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)

    weights = jax.ShapeDtypeStruct((layers, size, size), jnp.bfloat16, sharding=whole)
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=whole)
    text = jax.jit(program).lower(weights, x).compile().as_text()
    assert memory_traffic(text) / (2 * size * size) == pytest.approx(2 * layers + 2, abs=2.1)
