"""One layer of an encoder or a decoder: sub-layers, each inside a residual connection with its norm."""

from typing import Literal, NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int, Key

from transformer_jax.functional import Mask, dropout
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers.attention import KeyValue, MultiHeadAttention
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.norm import LayerNorm

NormPlacement = Literal["post", "pre"]


class Cache(NamedTuple):
    """What a decoder block remembers: its own keys and values so far, and those of the encoder's output."""

    own: KeyValue
    memory: KeyValue | None


class Weights(NamedTuple):
    """Attention weights of a block: to its own sequence, and to the encoder's output."""

    own: Float[Array, "B N T T"]
    memory: Float[Array, "B N T S"] | None


class Residual(nnx.Module):
    """The connection around a sub-layer: `leave(x, sublayer(enter(x)))`.

    `post` is the paper's LayerNorm(x + Sublayer(x)); `pre` is x + Sublayer(LayerNorm(x)), which needs one more norm
    after the last block.
    """

    def __init__(self, d_model: int, placement: NormPlacement, epsilon: float, dropout_rate: float, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(d_model, epsilon, rngs=rngs)
        self.placement = placement
        self.dropout_rate = dropout_rate

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the sub-layer sees."""
        return self.norm(x) if self.placement == "pre" else x

    def leave(self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], key: Array | None) -> Float[Array, "B T D"]:
        """What comes of x and the sub-layer's output y."""
        x = x + dropout(y, self.dropout_rate, key)
        return self.norm(x) if self.placement == "post" else x


class Block(nnx.Module):
    """Self-attention, optional cross-attention, feed-forward (Vaswani et al. 2017, section 3.1)."""

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        d_ff: int,
        activation: Activation,
        norm: NormPlacement,
        norm_epsilon: float,
        dropout_rate: float,
        attention_dropout_rate: float,
        activation_dropout_rate: float,
        cross_attention: bool,
        rngs: nnx.Rngs,
    ):
        def residual() -> Residual:
            return Residual(d_model, norm, norm_epsilon, dropout_rate, rngs=rngs)

        self.self_attention = MultiHeadAttention(d_model, num_heads, attention_dropout_rate, rngs=rngs)
        self.self_attention_residual = residual()
        if cross_attention:
            self.cross_attention = MultiHeadAttention(d_model, num_heads, attention_dropout_rate, rngs=rngs)
            self.cross_attention_residual = residual()
        self.feed_forward = FeedForward(d_model, d_ff, activation, activation_dropout_rate, rngs=rngs)
        self.feed_forward_residual = residual()

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
    ) -> tuple[Float[Array, "B T D"], Cache | None, Weights]:
        """x after this layer. With a `cache`, x is what comes new from `position` on, and the cache grows by it."""
        keys = split(dropout_key, 6)

        y = self.self_attention_residual.enter(x)
        if cache is not None:
            cache = cache._replace(own=cache.own.write(self.self_attention.project(y), position))
        y, own_weights = self.self_attention(y, cache.own if cache else y, mask=mask, dropout_key=keys[0])
        x = self.self_attention_residual.leave(x, y, keys[1])

        memory_weights = None
        if hasattr(self, "cross_attention"):
            y = self.cross_attention_residual.enter(x)
            known = cache.memory if cache else memory
            y, memory_weights = self.cross_attention(y, known, mask=memory_mask, dropout_key=keys[2])
            x = self.cross_attention_residual.leave(x, y, keys[3])

        y = self.feed_forward_residual.enter(x)
        y = self.feed_forward(y, dropout_key=keys[4])
        x = self.feed_forward_residual.leave(x, y, keys[5])
        return x, cache, Weights(own_weights, memory_weights)
