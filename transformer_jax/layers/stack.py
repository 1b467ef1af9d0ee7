"""A stack of equal layers: parameters with a leading layer axis, run by one scan, compiled once whatever the depth."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from transformer_jax.functional import Mask
from transformer_jax.functional.dropout import split
from transformer_jax.layers.block import Block, Cache, Weights
from transformer_jax.layers.norm import LayerNorm
from transformer_jax.layers.parameter import is_parameter
from transformer_jax.parallel.axes import constrain


class Stack(nnx.Module):
    """`num_layers` blocks one after the other, then a norm where there is one."""

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], Block],
        num_layers: int,
        *,
        final_norm: LayerNorm | None,
        rematerialize: bool,
        rngs: nnx.Rngs,
    ):
        keys = jax.random.split(rngs.params(), num_layers)
        blocks = jax.vmap(lambda key: make_block(nnx.Rngs(key)))(keys)
        self.blocks = jax.tree.map(_name_layer_axis, blocks, is_leaf=is_parameter)
        self.final_norm = final_norm
        self.rematerialize = rematerialize

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None = None,
        *,
        mask: Mask | Array | None = None,
        memory_mask: Mask | Array | None = None,
        cache: Cache | None = None,
        position: Int[Array, ""] | int = 0,
        dropout_key: Key[Array, "#B"] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Cache | None, Weights | None]:
        """x after all layers; the cache and, when asked for, the attention weights have a leading layer axis."""
        num_layers = jax.tree.leaves(self.blocks)[0].shape[0]

        def layer(x, block_cache_key):
            block, cache, key = block_cache_key
            x, cache, weights = block(
                x, memory, mask=mask, memory_mask=memory_mask, cache=cache, position=position, dropout_key=key
            )
            return constrain(x, "batch", "length", None), (cache, weights if return_weights else None)

        if self.rematerialize:
            layer = jax.checkpoint(layer)
        keys = None if dropout_key is None else jnp.stack(split(dropout_key, num_layers))  # type: ignore[arg-type]
        x, (cache, weights) = jax.lax.scan(layer, constrain(x, "batch", "length", None), (self.blocks, cache, keys))
        return x if self.final_norm is None else self.final_norm(x), cache, weights


def _name_layer_axis(parameter: nnx.Param) -> nnx.Variable:
    return parameter.replace(axes=("layers", *parameter.axes))
