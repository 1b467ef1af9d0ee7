"""The feed-forward network with its parameters."""

from flax import nnx
from jaxtyping import Array, Float, Key

from transformer_jax.functional import feed_forward
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers.parameter import glorot_uniform, parameter, zeros


class FeedForward(nnx.Module):
    """Two linear maps and an activation between them, the same at every position (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation, dropout_rate: float, *, rngs: nnx.Rngs):
        self.weight_in = parameter(rngs, {"embed": d_model, "ff": d_ff}, glorot_uniform(1), decay=True)
        self.bias_in = parameter(rngs, {"ff": d_ff}, zeros, decay=False)
        self.weight_out = parameter(rngs, {"ff": d_ff, "embed": d_model}, glorot_uniform(1), decay=True)
        self.bias_out = parameter(rngs, {"embed": d_model}, zeros, decay=False)
        self.activation = activation
        self.dropout_rate = dropout_rate

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T D"]:
        return feed_forward(
            x,
            self.weight_in[...],
            self.weight_out[...],
            self.bias_in[...],
            self.bias_out[...],
            activation=self.activation,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )
