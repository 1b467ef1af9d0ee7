"""Normalization with its parameters."""

from flax import nnx
from jaxtyping import Array, Float

from transformer_jax.functional import layer_norm, rms_norm
from transformer_jax.layers.parameter import ones, parameter, zeros


class LayerNorm(nnx.Module):
    """Normalization to mean 0 and variance 1 over the features, with a scale and a bias (Ba et al. 2016)."""

    def __init__(self, d_model: int, epsilon: float, *, rngs: nnx.Rngs):
        self.scale = parameter(rngs, {"embed": d_model}, ones, decay=False)
        self.bias = parameter(rngs, {"embed": d_model}, zeros, decay=False)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(x, self.scale[...], self.bias[...], epsilon=self.epsilon)


class RMSNorm(nnx.Module):
    """Normalization to mean square 1 over the features, with a scale and no bias (Zhang and Sennrich 2019)."""

    def __init__(self, d_model: int, epsilon: float, *, rngs: nnx.Rngs):
        self.scale = parameter(rngs, {"embed": d_model}, ones, decay=False)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(x, self.scale[...], epsilon=self.epsilon)


Norm = LayerNorm | RMSNorm
