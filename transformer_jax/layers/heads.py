"""What stands on top of a model: small layers from its hidden states to logits, the same for every architecture.

The output axis of what gives labels is called "labels", and of nothing else: those weights depend on a data set.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from transformer_jax.functional import dropout
from transformer_jax.functional.feed_forward import Activation, activation_function
from transformer_jax.layers.linear import Embedding, Linear
from transformer_jax.layers.norm import LayerNorm
from transformer_jax.layers.parameter import Axes, Initializer, LinearInitializer, glorot_uniform, parameter, zeros
from transformer_jax.parallel.axes import constrain

PoolerActivation = Literal["tanh", "relu"]


class Pooler(nnx.Module):
    """A vector for a whole text, from that of its first token: f(xW + b) (Devlin et al. 2019, section 3.1)."""

    def __init__(
        self,
        d_model: int,
        activation: PoolerActivation,
        *,
        initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        self.output = Linear({"embed": d_model}, {"pooled": d_model}, initializer=initializer, rngs=rngs)
        self.activation = activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        return (jnp.tanh if self.activation == "tanh" else jax.nn.relu)(self.output(x[:, 0]))


def last_valid(x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None) -> Float[Array, "B D"]:
    """The vector of the last token of each row that is not padding: what a causal model knows of a whole text.

    The padding may be on either side. Without `valid` there is none.
    """
    if valid is None:
        return x[:, -1]
    if valid.shape != x.shape[:2]:
        raise ValueError(f"valid has shape {valid.shape} but x has batch and length {x.shape[:2]}")
    if valid.dtype != jnp.bool_:
        raise TypeError(f"valid must be boolean, False at padding; got {valid.dtype}")
    last = jnp.max(jnp.where(valid, jnp.arange(x.shape[1])[None], 0), axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


class LanguageModelHead(nnx.Module):
    """The logits of each id, in float32: scale * x E^T + b, where E is a table of the head's own or the embedding's.

    Args:
        d_model: size of what comes in.
        vocab_size: number of ids.
        tied: whether E is that of the embedding, which is then an argument of each call.
        bias: whether there is a b.
        scale: multiplies x (T5's, whose embedding is too large for an output layer).
        transform: if given, x is first norm(f(xW + c)) with this activation f (Devlin et al. 2019).
        norm_epsilon: of that norm.
        initializer: of the head's own table.
        transform_initializer: of W.
        rngs: the source of the keys that the weights are initialized with.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        *,
        tied: bool,
        bias: bool = False,
        scale: float = 1.0,
        transform: Activation | None = None,
        norm_epsilon: float = 1e-12,
        initializer: Initializer | None = None,
        transform_initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        self.activation = transform
        if transform is not None:
            inputs, outputs = {"embed": d_model}, {"transformed": d_model}
            self.transform = Linear(inputs, outputs, initializer=transform_initializer, rngs=rngs)
            self.norm = LayerNorm(d_model, norm_epsilon, rngs=rngs)
        self.output = None if tied else Embedding(vocab_size, d_model, initializer=initializer, rngs=rngs)
        self.bias = parameter(rngs, {"vocab": vocab_size}, zeros, decay=False) if bias else None
        self.scale = scale

    def __call__(self, x: Float[Array, "B T D"], embedding: Embedding) -> Float[Array, "B T V"]:
        """The logits of x. The embedding is read only where its table is the head's."""
        if self.activation is not None:
            x = self.norm(activation_function(self.activation)(self.transform(x)))
        x = x if self.scale == 1 else x * self.scale
        logits = (embedding if self.output is None else self.output).logits(x)
        if self.bias is not None:
            logits = logits + self.bias[None, None]
        return constrain(logits, "batch", "length", "vocab")


class _Logits(nnx.Module):
    """Dropout, then xW + b to a few logits in float32."""

    def __init__(
        self,
        d_model: int,
        outputs: Axes,
        dropout_rate: float,
        *,
        bias: bool = True,
        initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        self.output = Linear({"embed": d_model}, outputs, bias=bias, initializer=initializer, rngs=rngs)
        self.dropout_rate = dropout_rate

    def logits(self, x: Float[Array, "*shape D"], dropout_key: Key[Array, "#B"] | None) -> Float[Array, "*shape O"]:
        # In float32 all the way: bfloat16 has 8 bits, and the scores of many spans would be equal.
        return self.output(dropout(x, self.dropout_rate, dropout_key), dtype=jnp.float32)


class ClassificationHead(_Logits):
    """The logits of the label of a whole text, from one vector for it."""

    def __init__(
        self,
        d_model: int,
        num_labels: int,
        dropout_rate: float,
        *,
        bias: bool = True,
        initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        outputs = {"labels": num_labels}
        super().__init__(d_model, outputs, dropout_rate, bias=bias, initializer=initializer, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B labels"]:
        return self.logits(x, dropout_key)


class TaggingHead(_Logits):
    """The logits of the label of each token."""

    def __init__(
        self,
        d_model: int,
        num_labels: int,
        dropout_rate: float,
        *,
        initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        super().__init__(d_model, {"labels": num_labels}, dropout_rate, initializer=initializer, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T labels"]:
        return self.logits(x, dropout_key)


class SpanHead(_Logits):
    """Two logits for each token: to be the first and to be the last of an answer."""

    def __init__(
        self, d_model: int, dropout_rate: float, *, initializer: LinearInitializer = glorot_uniform, rngs: nnx.Rngs
    ):
        super().__init__(d_model, {"span": 2}, dropout_rate, initializer=initializer, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T 2"]:
        return self.logits(x, dropout_key)


class PairHead(_Logits):
    """Two logits for a pair of texts, from one vector for both: that the second follows the first, and that not."""

    def __init__(self, d_model: int, *, initializer: LinearInitializer = glorot_uniform, rngs: nnx.Rngs):
        super().__init__(d_model, {"pair": 2}, 0.0, initializer=initializer, rngs=rngs)

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B 2"]:
        return self.logits(x, None)
