"""Attention by content and distance, as Transformer-XL and XLNet have it, and the layer that is made of it."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.functional import dot_product_attention, window
from transformer_jax.functional.dropout import split
from transformer_jax.functional.relative import relative_position_scores, segment_scores
from transformer_jax.layers.attention import KeyValue
from transformer_jax.layers.block import Residual
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.norm import LayerNorm
from transformer_jax.layers.parameter import normal, parameter, same_normal


class StreamMask(NamedTuple):
    """Which keys the queries of a stream may attend to, which of them are of their type, and where the queries are."""

    mask: Bool[Array, "B 1 T S"]
    same_type: Bool[Array, "B 1 T S"] | None = None
    query_positions: Int[Array, "B T"] | None = None
    """Indices of the queries among the tokens, where they are not all tokens in their order."""

    def with_itself(self) -> "StreamMask":
        """The mask in which each token, be it padding, may attend to itself too."""
        return self._replace(mask=self.mask | window(0, 0).array(*self.mask.shape[2:]))

    def at(self, positions: Int[Array, "B P"]) -> "StreamMask":
        """The mask of the queries at these positions."""

        def rows(x: Array) -> Array:
            return jnp.take_along_axis(x, positions[:, None, :, None], axis=2)

        same_type = None if self.same_type is None else rows(self.same_type)
        return StreamMask(rows(self.mask), same_type, positions)


class RelativeKeyValue(NamedTuple):
    """What both streams attend to: keys and values of the content and the memory before it, and keys of distances."""

    content: KeyValue
    distance: Float[Array, "#B R N H"]


class RelativeAttention(nnx.Module):
    """Attention by content, distance and type: ((q + u) k + (q + v) r + (q + s) t) / sqrt(H).

    q and k are projections of query and key as ever, r one of their distance, t one of two vectors for types that are
    equal or not; u, v and s are what a head looks for whatever the query (Dai et al. 2019, 3.3; Yang et al. 2019, 2.5).
    """

    def __init__(self, d_model: int, num_heads: int, dropout_rate: float, *, standard_deviation: float, rngs: nnx.Rngs):
        embed, heads = {"embed": d_model}, {"heads": num_heads, "head": d_model // num_heads}
        linear, vector = same_normal(standard_deviation), normal(standard_deviation)
        self.query = Linear(embed, heads, bias=False, initializer=linear, rngs=rngs)
        self.key = Linear(embed, heads, bias=False, initializer=linear, rngs=rngs)
        self.value = Linear(embed, heads, bias=False, initializer=linear, rngs=rngs)
        self.distance = Linear(embed, heads, bias=False, initializer=linear, rngs=rngs)
        self.output = Linear(heads, embed, bias=False, initializer=linear, rngs=rngs)
        self.content_bias = parameter(rngs, heads, vector, decay=False)
        self.distance_bias = parameter(rngs, heads, vector, decay=False)
        self.type_bias = parameter(rngs, heads, vector, decay=False)
        self.type_embedding = parameter(rngs, {"type": 2} | heads, vector, decay=False)
        self.dropout_rate = dropout_rate

    def project(self, known: Float[Array, "B S D"], distances: Float[Array, "#B R D"]) -> RelativeKeyValue:
        """The keys and values of what may be attended to, and the keys of its distances."""
        return RelativeKeyValue(KeyValue(self.key(known), self.value(known)), self.distance(distances))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: RelativeKeyValue,
        mask: StreamMask,
        *,
        dropout_key: Key[Array, "#B"] | None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Attention of x, and the weights, which cost nothing if unused."""
        query = self.query(x)

        def biased(bias: nnx.Param) -> Array:
            return query + bias[None, None].astype(x.dtype)

        content, num_keys = memory.content, memory.content.key.shape[1]
        scores = relative_position_scores(biased(self.distance_bias), memory.distance, num_keys, mask.query_positions)
        if mask.same_type is not None:
            types = self.type_embedding[...].astype(x.dtype)
            scores = scores + segment_scores(biased(self.type_bias), types, mask.same_type)
        context, weights = dot_product_attention(
            biased(self.content_bias),
            content.key,
            content.value,
            mask=mask.mask,
            bias=scores * query.shape[-1] ** -0.5,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
            return_weights=True,
        )
        return self.output(context), weights


class RelativeBlock(nnx.Module):
    """Relative attention and feed-forward, of which either stream is made."""

    def __init__(
        self,
        self_attention: RelativeAttention,
        feed_forward: FeedForward,
        *,
        norm: Callable[[], LayerNorm],
        dropout_rate: float,
    ):
        self.self_attention = self_attention
        self.self_attention_residual = Residual(norm(), "post", dropout_rate)
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(norm(), "post", dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: RelativeKeyValue,
        mask: StreamMask,
        *,
        dropout_key: Key[Array, "#B"] | None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """x after this layer, and the attention weights."""
        keys = split(dropout_key, 4)
        y, weights = self.self_attention(x, memory, mask, dropout_key=keys[0])
        x = self.self_attention_residual.leave(x, y, keys[1])
        y = self.feed_forward(x, dropout_key=keys[2])
        return self.feed_forward_residual.leave(x, y, keys[3]), weights
