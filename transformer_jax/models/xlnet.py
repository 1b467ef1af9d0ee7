"""The encoder of XLNet (Yang et al. 2019), with the memory and the distances of Transformer-XL (Dai et al. 2019)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

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
    LayerNorm,
    RelativeAttention,
    RelativeBlock,
    Rematerialize,
    Stack,
    View,
    normal,
    parameter,
    same_normal,
    zeros,
)
from transformer_jax.models.checks import check_head, check_heads, check_rates, check_sizes, check_tokens
from transformer_jax.models.precision import Precision, compute_dtype
from transformer_jax.parallel.axes import constrain

DEVIATION = 0.02


@dataclass(frozen=True)
class XLNetConfig:
    """The shape of an encoder that predicts tokens in any order. `base` and `large` are XLNet."""

    vocab_size: int | None
    """Number of ids; None takes the tokenizer's."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Attention heads; divides d_model."""
    d_ff: int
    """Size inside the feed-forward network."""
    num_layers: int
    max_length: int
    """Longest text, for training; the model itself has no limit."""
    dropout_rate: float
    """On each sub-layer's output, inside the feed-forward network, on the encoded distances, and on what goes into and
    comes out of the stack."""
    attention_dropout_rate: float
    """On the attention weights."""
    activation: Activation
    """`gelu`, the exact one, is what transformers computes; the original code has its approximation, `gelu_tanh`."""
    norm_epsilon: float
    lm_head: bool
    """Whether there are logits: a bias for each id, beside the table of the embedding."""
    pad_id: int | None
    """The id that is not attended to; None takes the tokenizer's."""
    memory_length: int | None = None
    """Positions that are remembered of the text so far; None remembers all."""
    max_distance: int | None = None
    """Positions further apart than this count as this far; None tells all distances apart."""
    causal: bool = False
    """Let no token see a later one, as in Transformer-XL."""
    dtype: Precision = "auto"
    """Precision of the computation; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are float32."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing, a layer's activations (full), all but the results
    of matrix products (dots), or all but those of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Layers that are compiled as one piece: steps may be faster, compilation is slower."""

    def __post_init__(self):
        names = ("d_model", "num_heads", "d_ff", "num_layers", "max_length", "memory_length", "max_distance")
        check_sizes(self, *names)
        check_rates(self, "dropout_rate", "attention_dropout_rate")
        check_heads(self.d_model, self.num_heads)
        if self.d_model % 2:
            raise UserError(
                f"d_model={self.d_model} is odd; distances are encoded by sinusoids, which need an even one"
            )

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
    one for each place to be predicted, which reads the content stream as well and knows of its own token only where it
    stands (section 2.3).
    """

    def __init__(self, config: XLNetConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id are the tokenizer's to say; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(DEVIATION), rngs=rngs)
        self.mask_embedding = parameter(rngs, {"embed": config.d_model}, normal(DEVIATION), decay=False)
        self.encoder = _stack(config, rngs=rngs)
        if config.lm_head:
            self.output_bias = parameter(rngs, {"vocab": config.vocab_size}, zeros, decay=False)

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
        places: Int[Array, "B P"],
        types: Int[Array, "B T"] | None = None,
        *,
        allowed: Bool[Array, "B T T"],
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        memory: Float[Array, "L B M D"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B P V"]:
        """The logits of the tokens at some places, each given those that it may see: from the query stream.

        Args:
            ids: the text, with the tokens that are to be predicted.
            places: where these are, in any order; one may come again, to fill up a row.
            types: as in `__call__`.
            allowed: True where a token may see another, by the order in which they are predicted; False for a token
                and itself where it is predicted. In the content stream it sees itself all the same. A place that sees
                nothing is predicted from nothing.
            valid: as in `__call__`.
            segments: as in `__call__`.
            memory: as in `__call__`.
            dropout_key: one key per row, or None for no dropout.
        """
        return self.logits(self._run(ids, types, places, valid, allowed, segments, memory, dropout_key)[0])

    def hidden_and_memory(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        places: Int[Array, "B P"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        allowed: Bool[Array, "B T T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        memory: Float[Array, "L B M D"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B P D"], Float[Array, "L B M D"]]:
        """A vector for each token, or from the query stream for each of `places`; and the memory for the text after.

        What entered each layer is remembered, and no gradient flows through it (Dai et al. 2019, section 3.2).
        """
        x, seen = self._run(ids, types, places, valid, allowed, segments, memory, dropout_key, remember=True)
        return x, seen.memory  # type: ignore[return-value]

    def attention(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        valid: Array | None = None,
        allowed: Array | None = None,
        memory: Array | None = None,
    ) -> Float[Array, "L B N T S"]:
        """What attends to what, in every layer and head of the same pass; the memory comes before the tokens."""
        seen = self._run(ids, types, None, valid, allowed, None, memory, watch=True)[1]
        return seen.weights  # type: ignore[return-value]

    def logits(self, x: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """The logits of the token at each of the places that x is of."""
        check_head(self.config)
        logits = self.embedding.logits(x) + self.output_bias[None, None]
        return constrain(logits, "batch", "length", "vocab")

    def _run(
        self,
        ids: Array,
        types: Array | None,
        places: Array | None,
        valid: Array | None,
        allowed: Array | None,
        segments: Array | None,
        memory: Array | None,
        key: Array | None = None,
        watch: bool = False,
        remember: bool = False,
    ) -> tuple[Array, "_Seen"]:
        """The last of the query stream, if there are places, or else of the content stream."""
        check_tokens(ids=ids, types=types, places=places, segments=segments)
        content_key, query_key, distance_key, key, last_key = split(key, 5)
        config, (num_rows, num_tokens) = self.config, ids.shape
        num_remembered = 0 if memory is None else memory.shape[2]
        expected = (config.num_layers, num_rows, num_remembered, config.d_model)
        if memory is not None and memory.shape != expected:
            raise ValueError(f"memory has the shape {memory.shape}; this model and these ids need {expected}")
        query_view = self._view(ids, types, valid, allowed, segments, num_remembered)
        content_view = query_view.with_itself()
        distances = self._distances(num_tokens, num_remembered + num_tokens, distance_key)
        content = dropout(self.embedding(ids).astype(compute_dtype(config.dtype)), config.dropout_rate, content_key)
        query = None
        if places is not None:
            query_view = query_view.at(places)
            query = dropout(self._masked(places, num_tokens), config.dropout_rate, query_key)

        def layer(block, streams, memory, key):
            content, query = streams
            content_key, query_key = split(key, 2)
            known = content if memory is None else jnp.concatenate([memory.astype(content.dtype), content], axis=1)
            attended = block.self_attention.project(known, distances)
            content, weights = block(content, attended, content_view, dropout_key=content_key)
            if query is not None:
                query, _ = block(query, attended, query_view, dropout_key=query_key)
            kept = jax.lax.stop_gradient(known[:, -(config.memory_length or 0) :])
            return (content, query), _Seen(weights if watch else None, kept if remember else None)

        (content, query), seen = self.encoder(layer, (content, query), per_layer=memory, dropout_key=key)
        return dropout(content if query is None else query, config.dropout_rate, last_key), seen

    def _view(
        self,
        ids: Array,
        types: Array | None,
        valid: Array | None,
        allowed: Array | None,
        segments: Array | None,
        num_remembered: int,
    ) -> View:
        num_rows, num_tokens = ids.shape
        mask = padding(jnp.not_equal(ids, self.pad_id) if valid is None else valid)
        if allowed is not None:
            mask &= arbitrary(allowed[:, None])
        if segments is not None:
            mask &= same_segment(segments)
        if self.config.causal:
            mask &= causal()
        tokens = jnp.broadcast_to(mask.array(num_tokens, num_tokens), (num_rows, 1, num_tokens, num_tokens))
        seen = jnp.pad(tokens, ((0, 0), (0, 0), (0, 0), (num_remembered, 0)), constant_values=True)
        if types is None:
            return View(seen)
        known_types = jnp.pad(types, ((0, 0), (num_remembered, 0)))
        return View(seen, same_segment(types, known_types).array(*seen.shape[2:]))

    def _distances(self, num_queries: int, num_keys: int, key: Array | None) -> Float[Array, "#B R D"]:
        """The distances of queries and keys as sinusoids, which each layer projects by itself."""
        config, distances = self.config, relative_distances(num_queries, num_keys)
        if config.max_distance is not None:
            distances = jnp.clip(distances, -config.max_distance, config.max_distance)
        encoded = sinusoidal(distances, config.d_model, variant="halved")[None]
        return dropout(encoded.astype(compute_dtype(config.dtype)), config.dropout_rate, key)

    def _masked(self, places: Array, num_tokens: int) -> Float[Array, "B P D"]:
        """What the query stream begins with: one vector for all places. Outside the row it is NaN, or an error."""
        if not isinstance(places, jax.core.Tracer):
            outside = [place for place in np.ravel(places) if not 0 <= place < num_tokens]
            if outside:
                raise ValueError(f"place {outside[0]} is outside the row of {num_tokens} tokens")
        is_inside = (places >= 0) & (places < num_tokens)
        vector = self.mask_embedding[...].astype(compute_dtype(self.config.dtype))
        return jnp.where(is_inside[..., None], vector[None, None], jnp.nan)


class _Seen(NamedTuple):
    """What can be seen of a layer at work: the attention of the content stream, what is to be remembered."""

    weights: Float[Array, "B N T S"] | None
    memory: Float[Array, "B M D"] | None


def _stack(config: XLNetConfig, *, rngs: nnx.Rngs) -> Stack[RelativeBlock]:
    shape, dropout_rate, scheme = (config.d_model, config.d_ff), config.dropout_rate, same_normal(DEVIATION)

    def block(rngs: nnx.Rngs) -> RelativeBlock:
        return RelativeBlock(
            RelativeAttention(
                config.d_model, config.num_heads, config.attention_dropout_rate, deviation=DEVIATION, rngs=rngs
            ),
            FeedForward(*shape, config.activation, dropout_rate, scheme=scheme, rngs=rngs),
            norm=lambda: LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs),
            dropout_rate=dropout_rate,
        )

    return Stack(block, config.num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
