"""The attention maps of an encoder-decoder."""

from typing import NamedTuple

from jaxtyping import Array, Float


class AttentionWeights(NamedTuple):
    """The attention weights of every layer of a forward pass."""

    encoder: Float[Array, "L B N S S"]
    decoder: Float[Array, "L B N T T"]
    cross: Float[Array, "L B N T S"]
