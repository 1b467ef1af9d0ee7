import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests import tiny
from transformer_jax.models import Transformer
from transformer_jax.parallel import constrain, partition


def test_each_mesh_axis_is_used_once():
    axes = ("data", "fsdp", "tensor")
    assert partition(("batch", "length", None), axes) == PartitionSpec(("data", "fsdp"), None, None)
    assert partition(("embed", "heads", "head"), axes) == PartitionSpec(("fsdp",), ("tensor",), None)
    assert partition(("vocab", "embed"), ("data",)) == PartitionSpec(None, None)


@pytest.mark.parametrize(
    ("names", "first", "second", "axis"),
    [(("heads", "ff"), "heads", "ff", "tensor"), (("batch", None, "embed"), "batch", "embed", "fsdp")],
)
def test_two_axes_on_one_mesh_axis_are_an_error_that_names_them(names, first, second, axis):
    with pytest.raises(ValueError, match=f"axes '{first}' and '{second}' .* both lie on the mesh axis '{axis}'"):
        partition(names, ("data", "fsdp", "tensor"))
    partition(names, ("data",))  # where there is no such mesh axis, nothing collides


def test_without_a_mesh_nothing_is_done():
    x = jnp.ones((2, 3))
    assert constrain(x, "batch", "embed") is x


def test_the_model_on_a_mesh_gives_the_same_logits():
    model = tiny.make()
    source, target = tiny.pairs(rows=8)
    expected = tiny.forward(model, source, target)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        # A function of its own: one compiled without a mesh must not be taken from the cache.
        logits = jax.jit(lambda *arguments: Transformer.__call__(*arguments))(model, source, target)
    assert logits.sharding.spec == PartitionSpec("data", None, "tensor")
    np.testing.assert_allclose(logits, expected, atol=1e-5)
