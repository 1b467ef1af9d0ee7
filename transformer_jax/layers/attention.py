"""Multi-head attention with its parameters, and the keys and values that decoding keeps."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from transformer_jax.functional import Mask, RotaryScaling, dot_product_attention, rotary
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.parameter import LinearInitializer, glorot_uniform, scaled
from transformer_jax.layers.sequence_attention import sequence_attention, shards_sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValue:
    """What attention reads: the keys and values of S positions."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]

    def write(self, new: "KeyValue", start: Int[Array, ""] | int) -> "KeyValue":
        """These keys and values with `new` written from position `start` on. They must fit.

        Under a trace nothing can be raised: there what does not fit becomes NaN.
        """
        capacity, count = self.key.shape[1], new.key.shape[1]
        known = None if isinstance(start, jax.core.Tracer) else int(start)
        if (known or 0) + count > capacity:
            origin = "" if known is None else f" from position {known}"
            raise ValueError(f"the cache holds {capacity} positions; {count} more{origin} do not fit")

        def written(old: Array, add: Array) -> Array:
            # The slice would be moved back to where it fits, over what is there.
            add = jnp.where(start + count <= capacity, add, jnp.nan)
            return jax.lax.dynamic_update_slice_in_dim(old, add, start, axis=1)

        return jax.tree.map(written, self, new)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: queries and keys are rotated by their positions; see `functional.rotary`."""

    base: float = 10_000.0
    scaling: RotaryScaling | None = None

    def __call__(self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"]) -> Float[Array, "B T N H"]:
        return rotary(x, positions, base=self.base, scaling=self.scaling)


class MultiHeadAttention(nnx.Module):
    """Several heads of attention, each over its own projection, then mixed (Vaswani et al. 2017, section 3.2.2).

    Args:
        d_model: size of what comes in and goes out.
        num_heads: number of queries at each position.
        dropout_rate: probability that an attention weight is dropped.
        num_key_heads: number of keys and values at each position, each shared by several queries; `num_heads` if None.
        head_size: size of a query; d_model / num_heads if None.
        bias: whether the projections have one.
        scale: multiplies the scores; 1 / sqrt(head_size) if None. What they are not divided by, the initial queries
            are (T5).
        rotary: rotates queries and keys by their positions.
        initializer: of the projections.
        output_initializer: of the projection back to d_model, if it has another.
        rngs: the source of the keys that the weights are initialized with.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout_rate: float,
        *,
        num_key_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        rotary: Rotary | None = None,
        initializer: LinearInitializer = glorot_uniform,
        output_initializer: LinearInitializer | None = None,
        rngs: nnx.Rngs,
    ):
        if head_size is None and d_model % num_heads:
            raise ValueError(f"d_model={d_model} does not divide into num_heads={num_heads} heads of equal size")
        head_size = head_size or d_model // num_heads
        embed, heads = {"embed": d_model}, {"heads": num_heads, "head": head_size}
        key_heads = {"heads": num_key_heads or num_heads, "head": head_size}
        query_initializer = initializer if scale is None else scaled(initializer, head_size**-0.5 / scale)
        self.query = Linear(embed, heads, bias=bias, initializer=query_initializer, rngs=rngs)
        self.key = Linear(embed, key_heads, bias=bias, initializer=initializer, rngs=rngs)
        self.value = Linear(embed, key_heads, bias=bias, initializer=initializer, rngs=rngs)
        self.output = Linear(heads, embed, bias=bias, initializer=output_initializer or initializer, rngs=rngs)
        self.scale = scale
        self.rotary = rotary
        self.dropout_rate = dropout_rate

    def project(self, memory: Float[Array, "B S D"], positions: Int[Array, "#B S"] | None = None) -> KeyValue:
        """The keys and values of what is attended to."""
        return KeyValue(self._rotate(self.key(memory), positions), self.value(memory))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | KeyValue | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Attention of x to `memory` (to itself when there is none), and the weights, which cost nothing if unused.

        `bias` is added to the scores; `positions` are those of x, where a rotary encoding needs them.
        """
        if memory is None:
            memory = self.project(x, positions)
        elif not isinstance(memory, KeyValue):
            memory = self.project(memory)
        if memory.key.shape[0] != x.shape[0]:
            raise ValueError(f"memory has batch {memory.key.shape[0]} but the target has batch {x.shape[0]}")
        arrays = (self._rotate(self.query(x), positions), memory.key, memory.value)
        settings: dict[str, Any] = {
            "mask": mask,
            "bias": bias,
            "scale": self.scale,
            "dropout_rate": self.dropout_rate,
            "dropout_key": dropout_key,
        }
        context, weights = dot_product_attention(*arrays, **settings, return_weights=True)
        if x.shape[1] > 1 and shards_sequence():
            context = sequence_attention(*arrays, **settings)  # and no weights are computed unless somebody uses them
        return self.output(context), weights

    def _rotate(self, x: Float[Array, "B T N H"], positions: Int[Array, "#B T"] | None) -> Float[Array, "B T N H"]:
        if self.rotary is None:
            return x
        return self.rotary(x, jnp.arange(x.shape[1])[None] if positions is None else positions)
