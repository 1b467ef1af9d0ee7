"""A stack of equal layers: parameters with a leading layer axis, run by one scan, compiled once whatever the depth."""

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree

from transformer_jax.functional.dropout import split
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.parameter import is_parameter
from transformer_jax.parallel.axes import constrain

Rematerialize = Literal["none", "full", "dots", "dots_without_batch"]
"""What the backward pass computes again instead of having kept it: nothing, all of a layer, all but matrix products, or
all but matrix products with weights (so that all of attention, whose products have a batch axis, is computed again).
Activations, dropout masks and attention weights are never kept: the functions that make them see to that."""

_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

BlockType = TypeVar("BlockType", bound=nnx.Module)
Hidden = TypeVar("Hidden", bound=PyTree[Float[Array, "B T D"]])


class Stack(nnx.Module, Generic[BlockType]):
    """`num_layers` blocks one after the other. `blocks` is one block whose weights have a leading layer axis.

    Args:
        make_block: makes one block.
        num_layers: number of blocks.
        rematerialize: what of a layer the backward pass computes again instead of keeping it.
        unroll: number of layers that are compiled as one piece.
        rngs: the source of the keys that the blocks are initialized with.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], BlockType],
        num_layers: int,
        *,
        rematerialize: Rematerialize = "none",
        unroll: int = 1,
        rngs: nnx.Rngs,
    ):
        if rematerialize not in get_args(Rematerialize):
            raise ValueError(f"rematerialize={rematerialize!r} is unknown; choose {', '.join(get_args(Rematerialize))}")
        keys = jax.random.split(rngs.params(), num_layers)
        blocks = jax.vmap(lambda key: make_block(nnx.Rngs(key)))(keys)
        self.blocks: BlockType = jax.tree.map(_name_layer_axis, blocks, is_leaf=is_parameter)
        self.num_layers = num_layers
        self.rematerialize = rematerialize
        self.unroll = unroll

    def __call__(
        self,
        layer: Callable[[BlockType, Hidden, Any, Array | None], tuple[Hidden, Any]],
        x: Hidden,
        *,
        per_layer: Any = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Hidden, Any]:
        """x after all layers, and the auxiliary outputs of each layer, with a leading layer axis.

        Args:
            layer: (block, x, this layer's slice of `per_layer`, its dropout key) to (x, auxiliary outputs).
            x: the input of the first layer.
            per_layer: arrays with a leading layer axis, such as a cache.
            dropout_key: one key per row, or None for no dropout.
        """

        def step(x, block_slice_key):
            x, out = layer(block_slice_key[0], x, *block_slice_key[1:])
            return _constrain(x), out

        if self.rematerialize != "none":
            # Inside a loop nothing can be merged with what was computed before it: barriers against it would only cost.
            is_loop = self.unroll < self.num_layers
            step = jax.checkpoint(step, prevent_cse=not is_loop, policy=_POLICIES[self.rematerialize])
        keys = split(dropout_key, self.num_layers)
        stacked = None if dropout_key is None else jnp.stack(keys)  # type: ignore[arg-type]
        blocks = _rounded(self.blocks, jax.tree.leaves(x)[0].dtype)
        return jax.lax.scan(step, _constrain(x), (blocks, per_layer, stacked), unroll=self.unroll)


def _rounded(blocks: BlockType, dtype: jnp.dtype) -> BlockType:
    """The blocks with linear maps in the dtype that they compute in.

    They would round their weights themselves, layer by layer. Rounded before the loop, the weights are gathered from
    other devices, and their gradients are collected from the layers, in half the memory.
    """

    def rounded(node: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), node) if isinstance(node, Linear) else node

    return jax.tree.map(rounded, blocks, is_leaf=lambda node: isinstance(node, Linear))


def _constrain(x: Hidden) -> Hidden:
    return jax.tree.map(lambda leaf: constrain(leaf, "batch", "length", None), x)


def _name_layer_axis(parameter: nnx.Param) -> nnx.Variable:
    return parameter.replace(axes=("layers", *parameter.axes))
