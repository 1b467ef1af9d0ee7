"""The encoder of XLNet (Yang et al. 2019), with the memory and the distances of Transformer-XL (Dai et al. 2019)."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import arbitrary, causal, dropout, padding, sinusoidal
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.functional.relative import relative_distances
from transformer_jax.layers import (
    Embedding,
    FeedForward,
    LanguageModelHead,
    LayerNorm,
    RelativeAttention,
    RelativeBlock,
    Rematerialize,
    Stack,
    StreamMask,
    normal,
    parameter,
    same_normal,
)
from transformer_jax.models.checks import check_heads, check_output_layer, check_rates, check_sizes, check_tokens
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.initialization import STANDARD_DEVIATION
from transformer_jax.models.precision import Precision, compute_dtype


@dataclass(frozen=True)
class XLNetConfig(ModelConfig):
    """Config of an encoder that predicts tokens in any order. `base` and `large` are XLNet."""

    adjustable: ClassVar[tuple[str, ...]] = (
        "dropout_rate",
        "attention_dropout_rate",
        "dtype",
        "rematerialize",
        "unroll",
    )

    vocab_size: int | None
    """Number of ids in the vocabulary; None takes that of the tokenizer."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Number of attention heads; must divide d_model."""
    d_ff: int
    """Size of the hidden layer of the feed-forward network."""
    num_layers: int
    """Number of layers."""
    max_length: int
    """Longest text in tokens, for training; the model itself has no limit."""
    dropout_rate: float
    """Probability of dropout on each sub-layer's output, inside the feed-forward network, on the encoded distances, and
    on the input and the output of the stack."""
    attention_dropout_rate: float
    """Probability of dropout on the attention weights."""
    activation: Activation
    """Activation of the feed-forward network; transformers has gelu, the exact one, the original code its
    approximation, gelu_tanh."""
    norm_epsilon: float
    """Small number added to the variance in each norm, against division by zero."""
    lm_head: bool
    """Whether there is an output layer to the vocabulary, which shares its table with the embedding; without one there
    are hidden states and no logits."""
    pad_id: int | None
    """Id of padding, which is not attended to; None takes that of the tokenizer."""
    memory_length: int | None = None
    """Number of positions of the text so far that are remembered; None remembers all."""
    max_distance: int | None = None
    """Largest distance that is told apart: positions further apart count as this far; None tells all distances
    apart."""
    causal: bool = False
    """Whether no token may attend to a later one, as in Transformer-XL."""
    dtype: Precision = "auto"
    """Precision of the computation: bfloat16, float32, or auto, which is bfloat16 on TPU and GPU and float32 on CPU.
    The parameters are float32 in any case."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing (none), all activations of a layer (full), all but
    the results of matrix products (dots), or all but the results of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Number of layers that are compiled as one piece: more may make steps faster, and makes compilation slower."""

    def __post_init__(self):
        names = ("d_model", "num_heads", "d_ff", "num_layers", "max_length", "memory_length", "max_distance")
        check_sizes(self, *names)
        check_rates(self, "dropout_rate", "attention_dropout_rate")
        check_heads(self.d_model, self.num_heads)
        if self.d_model % 2:
            raise UserError(
                f"d_model={self.d_model} is odd; distances are encoded by sinusoids, which need an even one"
            )

    def build(self, rngs: nnx.Rngs) -> "XLNet":
        """The model of this config."""
        return XLNet(self, rngs=rngs)

    @classmethod
    def base(cls, vocab_size: int | None = 32_000, *, pad_id: int | None = 5) -> "XLNetConfig":
        """XLNet-base: 116,718,336 parameters, with the mask's vector, and 32,000 more for the bias of the logits."""
        return cls(
            vocab_size=vocab_size,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            num_layers=12,
            max_length=512,
            dropout_rate=0.1,
            attention_dropout_rate=0.1,
            activation="gelu",
            norm_epsilon=1e-12,
            lm_head=True,
            pad_id=pad_id,
        )

    @classmethod
    def large(cls, vocab_size: int | None = 32_000, *, pad_id: int | None = 5) -> "XLNetConfig":
        """XLNet-large: 360,268,800 parameters, and the bias of the logits."""
        return replace(cls.base(vocab_size, pad_id=pad_id), d_model=1024, num_heads=16, d_ff=4096, num_layers=24)


class XLNet(nnx.Module):
    """Ids to a vector for each, or to the logits of some. `XLNet(XLNetConfig.base(), rngs=nnx.Rngs(0))`.

    The content stream holds a vector for each token, made of it and of those that it may see. The query stream holds
    one for each token to be predicted, which reads the content stream as well and knows of its own token only the
    position (section 2.3).
    """

    def __init__(self, config: XLNetConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id come from the tokenizer; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(STANDARD_DEVIATION), rngs=rngs)
        self.mask_embedding = parameter(rngs, {"embed": config.d_model}, normal(STANDARD_DEVIATION), decay=False)
        self.encoder = _stack(config, rngs=rngs)
        if config.lm_head:
            self.lm_head = LanguageModelHead(config.d_model, config.vocab_size, tied=True, bias=True, rngs=rngs)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        valid: Bool[Array, "B T"] | None = None,
        allowed: Bool[Array, "B T T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        memory: Float[Array, "L B M D"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """A vector for each token: the content stream.

        Args:
            ids: the text, or two of them, with the special tokens after them.
            types: the kind of each token: 0 and 1 for the first and the second text, 2 for the last special token. It
                only counts which are equal; by default, all are.
            valid: False for padding; what is not pad_id by default.
            allowed: True where a token may see another; all may by default. A token always sees itself.
            segments: which example each token belongs to, where a row holds several. They do not see each other.
            memory: what `hidden_and_memory` gave for the text before, of type 0, which all tokens may see.
            dropout_key: one key per row, or None for no dropout.
        """
        return self._run(ids, types, None, valid, allowed, segments, memory, dropout_key)[0]

    def predict(
        self,
        ids: Int[Array, "B T"],
        target_positions: Int[Array, "B P"],
        types: Int[Array, "B T"] | None = None,
        *,
        allowed: Bool[Array, "B T T"],
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        memory: Float[Array, "L B M D"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B P V"]:
        """The logits of the tokens at some positions, each given those that it may see: from the query stream.

        Args:
            ids: the text, with the tokens that are to be predicted.
            target_positions: the indices of these in the row, in any order; one may come again, to fill up a row.
            types: as in `__call__`.
            allowed: True where a token may see another, by the order in which they are predicted; False for a token
                and itself where it is predicted. In the content stream it sees itself all the same. A token that sees
                nothing is predicted from nothing.
            valid: as in `__call__`.
            segments: as in `__call__`.
            memory: as in `__call__`.
            dropout_key: one key per row, or None for no dropout.
        """
        return self.logits(self._run(ids, types, target_positions, valid, allowed, segments, memory, dropout_key)[0])

    def hidden_and_memory(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        target_positions: Int[Array, "B P"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        allowed: Bool[Array, "B T T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        memory: Float[Array, "L B M D"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B P D"], Float[Array, "L B M D"]]:
        """A vector for each token, or from the query stream for each target; and the memory for the text after.

        What entered each layer is remembered, and no gradient flows through it (Dai et al. 2019, section 3.2).
        """
        x, outputs = self._run(
            ids, types, target_positions, valid, allowed, segments, memory, dropout_key, remember=True
        )
        return x, outputs.memory  # type: ignore[return-value]

    def attention(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        valid: Array | None = None,
        allowed: Array | None = None,
        memory: Array | None = None,
    ) -> Float[Array, "L B N T S"]:
        """The attention maps of every layer and head, from the same pass; the memory comes before the tokens."""
        outputs = self._run(ids, types, None, valid, allowed, None, memory, return_attention=True)[1]
        return outputs.attention  # type: ignore[return-value]

    def logits(self, x: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """The logits of the token at each of the positions that x is of."""
        check_output_layer(self.config)
        return self.lm_head(x, self.embedding)

    def _run(
        self,
        ids: Array,
        types: Array | None,
        target_positions: Array | None,
        valid: Array | None,
        allowed: Array | None,
        segments: Array | None,
        memory: Array | None,
        key: Array | None = None,
        return_attention: bool = False,
        remember: bool = False,
    ) -> tuple[Array, "_StreamOutputs"]:
        """The last of the query stream, if there are targets, or else of the content stream."""
        check_tokens(ids=ids, types=types, target_positions=target_positions, segments=segments)
        content_key, query_key, distance_key, key, last_key = split(key, 5)
        config, (num_rows, num_tokens) = self.config, ids.shape
        num_remembered = 0 if memory is None else memory.shape[2]
        expected = (config.num_layers, num_rows, num_remembered, config.d_model)
        if memory is not None and memory.shape != expected:
            raise ValueError(f"memory has the shape {memory.shape}; this model and these ids need {expected}")
        query_mask = self._mask(ids, types, valid, allowed, segments, num_remembered)
        content_mask = query_mask.with_itself()
        distances = self._distances(num_tokens, num_remembered + num_tokens, distance_key)
        content = dropout(self.embedding(ids).astype(compute_dtype(config.dtype)), config.dropout_rate, content_key)
        query = None
        if target_positions is not None:
            query_mask = query_mask.at(target_positions)
            query = dropout(self._masked(target_positions, num_tokens), config.dropout_rate, query_key)

        def layer(block, streams, memory, key):
            content, query = streams
            content_key, query_key = split(key, 2)
            known = content if memory is None else jnp.concatenate([memory.astype(content.dtype), content], axis=1)
            projected = block.self_attention.project(known, distances)
            content, weights = block(content, projected, content_mask, dropout_key=content_key)
            if query is not None:
                query, _ = block(query, projected, query_mask, dropout_key=query_key)
            kept = jax.lax.stop_gradient(known[:, -(config.memory_length or 0) :])
            return (content, query), _StreamOutputs(weights if return_attention else None, kept if remember else None)

        (content, query), outputs = self.encoder(layer, (content, query), per_layer=memory, dropout_key=key)
        return dropout(content if query is None else query, config.dropout_rate, last_key), outputs

    def _mask(
        self,
        ids: Array,
        types: Array | None,
        valid: Array | None,
        allowed: Array | None,
        segments: Array | None,
        num_remembered: int,
    ) -> StreamMask:
        num_rows, num_tokens = ids.shape
        mask = padding(jnp.not_equal(ids, self.pad_id) if valid is None else valid)
        if allowed is not None:
            mask &= arbitrary(allowed[:, None])
        if segments is not None:
            mask &= same_segment(segments)
        if self.config.causal:
            mask &= causal()
        tokens = jnp.broadcast_to(mask.array(num_tokens, num_tokens), (num_rows, 1, num_tokens, num_tokens))
        visible = jnp.pad(tokens, ((0, 0), (0, 0), (0, 0), (num_remembered, 0)), constant_values=True)
        if types is None:
            return StreamMask(visible)
        known_types = jnp.pad(types, ((0, 0), (num_remembered, 0)))
        return StreamMask(visible, same_segment(types, known_types).array(*visible.shape[2:]))

    def _distances(self, num_queries: int, num_keys: int, key: Array | None) -> Float[Array, "#B R D"]:
        """The distances of queries and keys as sinusoids, which each layer projects by itself."""
        config, distances = self.config, relative_distances(num_queries, num_keys)
        if config.max_distance is not None:
            distances = jnp.clip(distances, -config.max_distance, config.max_distance)
        encoded = sinusoidal(distances, config.d_model, variant="halved")[None]
        return dropout(encoded.astype(compute_dtype(config.dtype)), config.dropout_rate, key)

    def _masked(self, target_positions: Array, num_tokens: int) -> Float[Array, "B P D"]:
        """The input of the query stream: one vector for all targets. Outside the row it is NaN, or an error."""
        if not isinstance(target_positions, jax.core.Tracer):
            outside = [position for position in np.ravel(target_positions) if not 0 <= position < num_tokens]
            if outside:
                raise ValueError(f"target position {outside[0]} is outside the row of {num_tokens} tokens")
        is_inside = (target_positions >= 0) & (target_positions < num_tokens)
        vector = self.mask_embedding[...].astype(compute_dtype(self.config.dtype))
        return jnp.where(is_inside[..., None], vector[None, None], jnp.nan)


class _StreamOutputs(NamedTuple):
    """Auxiliary outputs of a layer: the attention map of the content stream, and what is to be remembered."""

    attention: Float[Array, "B N T S"] | None
    memory: Float[Array, "B M D"] | None


def _stack(config: XLNetConfig, *, rngs: nnx.Rngs) -> Stack[RelativeBlock]:
    shape, dropout_rate, initializer = (
        (config.d_model, config.d_ff),
        config.dropout_rate,
        same_normal(STANDARD_DEVIATION),
    )

    def block(rngs: nnx.Rngs) -> RelativeBlock:
        return RelativeBlock(
            RelativeAttention(
                config.d_model,
                config.num_heads,
                config.attention_dropout_rate,
                standard_deviation=STANDARD_DEVIATION,
                rngs=rngs,
            ),
            FeedForward(*shape, config.activation, dropout_rate, initializer=initializer, rngs=rngs),
            norm=lambda: LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs),
            dropout_rate=dropout_rate,
        )

    return Stack(block, config.num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
