"""One layer of an encoder or a decoder: sub-layers, each inside a residual connection with its norm."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.functional import Mask, dropout
from transformer_jax.functional.dropout import split
from transformer_jax.functional.experts import Balance
from transformer_jax.layers.attention import KeyValue, MultiHeadAttention
from transformer_jax.layers.experts import Experts
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.norm import Norm

NormPlacement = Literal["post", "pre"]
"""After each residual sum, as in the paper, or before each sub-layer."""


class AuxiliaryOutputs(NamedTuple):
    """What a block computes besides its output: both attention maps, and how evenly its experts are used."""

    self_attention: Float[Array, "B N T T"] | None
    cross_attention: Float[Array, "B N T S"] | None
    balance: Balance | None

    def without_attention(self) -> "AuxiliaryOutputs":
        """Without the attention maps, which the compiler then never stores."""
        return self._replace(self_attention=None, cross_attention=None)


class Residual(nnx.Module):
    """The connection around a sub-layer: `leave(x, sublayer(enter(x)))`.

    `post` is the paper's LayerNorm(x + Sublayer(x)); `pre` is x + Sublayer(LayerNorm(x)), which needs one more norm
    after the last block.
    """

    def __init__(self, norm: Norm, placement: NormPlacement, dropout_rate: float):
        self.norm = norm
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
    """Self-attention, optional cross-attention, feed-forward or experts (Vaswani et al. 2017, section 3.1)."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        feed_forward: FeedForward | Experts,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm: Callable[[], Norm],
        placement: NormPlacement,
        dropout_rate: float,
    ):
        self.self_attention = self_attention
        self.self_attention_residual = Residual(norm(), placement, dropout_rate)
        self.cross_attention = cross_attention
        if cross_attention is not None:
            self.cross_attention_residual = Residual(norm(), placement, dropout_rate)
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(norm(), placement, dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | KeyValue | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        memory_mask: Mask | Array | None = None,
        positions: Int[Array, "#B T"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        cache: KeyValue | None = None,
        start: Int[Array, ""] | int = 0,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValue | None, AuxiliaryOutputs]:
        """x after this layer, its cache, and its auxiliary outputs.

        Args:
            x: the output of the layer before.
            memory: the encoder's output, for cross-attention; or the keys and values made of it.
            mask: what may attend to what within x.
            bias: added to the scores of self-attention.
            memory_mask: what of the memory may be attended to.
            positions: of x, where attention itself encodes them.
            valid: which of x is not padding; experts pass over the rest.
            cache: the keys and values of all positions before x; those of x are added to it.
            start: the position in the cache of the first of x.
            dropout_key: one key per row, or None for no dropout.
        """
        keys = split(dropout_key, 6)

        y = self.self_attention_residual.enter(x)
        known = self.self_attention.project(y, positions)
        if cache is not None:
            known = cache = cache.write(known, start)
        y, self_weights = self.self_attention(y, known, mask=mask, bias=bias, positions=positions, dropout_key=keys[0])
        x = self.self_attention_residual.leave(x, y, keys[1])

        cross_weights = None
        if self.cross_attention is not None:
            y = self.cross_attention_residual.enter(x)
            y, cross_weights = self.cross_attention(y, memory, mask=memory_mask, dropout_key=keys[2])
            x = self.cross_attention_residual.leave(x, y, keys[3])

        y, balance = self.feed_forward_residual.enter(x), None
        if isinstance(self.feed_forward, Experts):
            y, balance = self.feed_forward(y, valid=valid, dropout_key=keys[4])
        else:
            y = self.feed_forward(y, dropout_key=keys[4])
        x = self.feed_forward_residual.leave(x, y, keys[5])
        return x, cache, AuxiliaryOutputs(self_weights, cross_weights, balance)
