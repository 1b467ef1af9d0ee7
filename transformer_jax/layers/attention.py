"""Multi-head attention with its parameters, and the keys and values that decoding keeps."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import Mask, dot_product_attention
from transformer_jax.layers.linear import Linear


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValue:
    """What attention reads: the keys and values of S positions."""

    key: Float[Array, "B S N H"]
    value: Float[Array, "B S N H"]

    def write(self, new: "KeyValue", start: Int[Array, ""] | int) -> "KeyValue":
        """These keys and values with `new` written from position `start` on. They must fit."""
        capacity, count = self.key.shape[1], new.key.shape[1]
        if count > capacity or (not isinstance(start, jax.core.Tracer) and int(start) + count > capacity):
            raise UserError(f"the cache holds {capacity} positions; {count} more from position {start} do not fit")
        return jax.tree.map(lambda old, add: jax.lax.dynamic_update_slice_in_dim(old, add, start, axis=1), self, new)


class MultiHeadAttention(nnx.Module):
    """Several heads of attention, each over its own projection, then mixed (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, d_model: int, num_heads: int, dropout_rate: float, *, rngs: nnx.Rngs):
        if d_model % num_heads:
            raise UserError(f"d_model={d_model} does not divide into num_heads={num_heads} heads of equal size")
        heads = {"heads": num_heads, "head": d_model // num_heads}
        self.query = Linear({"embed": d_model}, heads, rngs=rngs)
        self.key = Linear({"embed": d_model}, heads, rngs=rngs)
        self.value = Linear({"embed": d_model}, heads, rngs=rngs)
        self.output = Linear(heads, {"embed": d_model}, rngs=rngs)
        self.dropout_rate = dropout_rate

    def project(self, memory: Float[Array, "B S D"]) -> KeyValue:
        """The keys and values of what is attended to."""
        return KeyValue(self.key(memory), self.value(memory))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | KeyValue | None = None,
        *,
        mask: Mask | Array | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Attention of x to `memory` (to itself when there is none), and the weights, which cost nothing if unused."""
        if not isinstance(memory, KeyValue):
            memory = self.project(x if memory is None else memory)
        if memory.key.shape[0] != x.shape[0]:
            raise ValueError(f"memory has batch {memory.key.shape[0]} but the target has batch {x.shape[0]}")
        context, weights = dot_product_attention(
            self.query(x),
            memory.key,
            memory.value,
            mask=mask,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            return_weights=True,
        )
        return self.output(context), weights


def empty_cache(num_rows: int, length: int, num_heads: int, head_size: int, dtype: jnp.dtype) -> KeyValue:
    """Room for the keys and values of `length` positions."""
    zeros = jnp.zeros((num_rows, length, num_heads, head_size), dtype)
    return KeyValue(zeros, zeros)
