"""The feed-forward network with its parameters."""

from flax import nnx
from jaxtyping import Array, Float, Key

from transformer_jax.functional import feed_forward
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.parameter import LinearInitializer, glorot_uniform


class FeedForward(nnx.Module):
    """Two linear maps and an activation between them, the same at every position (Vaswani et al. 2017, section 3.3).

    With a gate, the activation of a third map multiplies what is between them (Shazeer 2020).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Activation,
        dropout_rate: float,
        *,
        gated: bool = False,
        bias: bool = True,
        initializer: LinearInitializer = glorot_uniform,
        output_initializer: LinearInitializer | None = None,
        rngs: nnx.Rngs,
    ):
        embed, ff = {"embed": d_model}, {"ff": d_ff}
        self.input = Linear(embed, ff, bias=bias, initializer=initializer, rngs=rngs)
        self.gate = Linear(embed, ff, bias=bias, initializer=initializer, rngs=rngs) if gated else None
        self.output = Linear(ff, embed, bias=bias, initializer=output_initializer or initializer, rngs=rngs)
        self.activation = activation
        self.dropout_rate = dropout_rate

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T D"]:
        weight_in, bias_in = self.input.arrays()
        weight_out, bias_out = self.output.arrays()
        gate, bias_gate = (None, None) if self.gate is None else self.gate.arrays()
        return feed_forward(
            x,
            weight_in,
            weight_out,
            bias_in,
            bias_out,
            gate=gate,
            bias_gate=bias_gate,
            activation=self.activation,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )
