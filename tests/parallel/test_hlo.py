"""Programs as compilers write them: their computations, how often these run, and the sizes of arrays."""

import jax
import jax.numpy as jnp

from transformer_jax.parallel.hlo import arrays, computations


def test_a_loop_in_a_loop_runs_as_often_as_both():
    def outer(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) @ x, None), x, length=3)[0], None

    text = jax.jit(lambda x: jax.lax.scan(outer, x, length=4)[0]).lower(jnp.ones((8, 8))).compile().as_text()
    program = computations(text)
    assert [one.runs for one in program.values() if "sine(" in "".join(one.lines)] == [12]
    assert next(reversed(program.values())).runs == 1  # the entry


def test_instructions_by_name_with_their_operands():
    text = """HloModule m

ENTRY %main (a: f32[4], b: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  ROOT %sum.1 = f32[4]{0:T(128)} add(%a, %b), metadata={op_name="jit(f)/add"}
}
"""
    (entry,) = computations(text).values()
    found = entry.instructions["sum.1"]
    assert [*entry.instructions] == ["a", "b", "sum.1"]
    assert (found.opcode, found.shape, found.operands) == ("add", "f32[4]{0:T(128)}", ["a", "b"])


def test_the_arrays_of_a_shape():
    shape = "(bf16[4,2]{1,0:T(8,128)(2,1)}, pred[3]{0}, s32[]{:T(128)}, f32[2,2]{1,0:T(8,128)S(1)}, s4[3]{0})"
    assert [tuple(array) for array in arrays(shape)] == [
        (16, False, 0),
        (3, False, 0),
        (4, True, 0),
        (16, False, 1),
        (2, False, 0),
    ]
