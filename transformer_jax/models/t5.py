"""The encoder-decoder of T5 (Raffel et al. 2020) and of its successors T5 v1.1 and Flan-T5."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import Mask, causal, dropout, padding, relative_buckets, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import (
    Block,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    MultiHeadAttention,
    Rematerialize,
    RMSNorm,
    Seen,
    Stack,
    fan_in_normal,
    feed_forward_or_experts,
    normal,
    parameter,
)
from transformer_jax.models.checks import check_head, check_rates, check_sizes
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.encoder_decoder import EncoderDecoder, Segments
from transformer_jax.models.precision import Precision, compute_dtype
from transformer_jax.parallel.axes import constrain


@dataclass(frozen=True)
class T5Config:
    """The shape of a T5. `small` and `base` are the first version; `v1_1` makes the second of either."""

    vocab_size: int | None
    """Number of ids; None takes the tokenizer's."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Attention heads."""
    head_size: int
    """Size of a head; the heads together need not have the size of the model."""
    d_ff: int
    """Size inside the feed-forward network."""
    num_encoder_layers: int
    num_decoder_layers: int
    """0 for an encoder alone."""
    dropout_rate: float
    """On each sub-layer's output, the attention weights, inside the feed-forward network, and on what goes into and
    comes out of each stack."""
    activation: Activation
    """relu in the first version, gelu_tanh in the second."""
    gated: bool
    """Multiply what is inside the feed-forward network by a gate: the second version."""
    norm_epsilon: float
    num_buckets: int
    """Groups of distances that attention tells apart,"""
    max_distance: int
    """of which the last begins here."""
    tie_embeddings: bool
    """One table for source, target and output layer: the first version. The second has one more for the output."""
    scale_output: bool
    """Multiply what the output layer reads by 1 / sqrt(d_model): the first version, whose table is too large for it."""
    max_length: int
    """Longest text, for training and generation; the model itself has no limit."""
    pad_id: int | None
    """The id that is not attended to; None takes the tokenizer's."""
    experts: ExpertsConfig | None = None
    """Experts in place of each feed-forward network (Switch Transformer)."""
    lm_head: bool = True
    """Whether there is an output layer. Without, the model has hidden states and nothing else."""
    dtype: Precision = "auto"
    """Precision of the computation; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are float32."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing, a layer's activations (full), all but the results
    of matrix products (dots), or all but those of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Layers that are compiled as one piece: steps may be faster, compilation is slower."""

    def __post_init__(self):
        names = ("d_model", "num_heads", "head_size", "d_ff", "num_encoder_layers", "max_length")
        check_sizes(self, *names, "num_buckets", "max_distance")
        check_rates(self, "dropout_rate")
        if self.num_decoder_layers < 0 or (self.lm_head and not self.num_decoder_layers):
            raise UserError(
                f"num_decoder_layers={self.num_decoder_layers} must be at least 1; or 0, for an encoder alone, with "
                "lm_head=False"
            )
        if self.num_buckets < 4 or self.max_distance <= self.num_buckets // 2:
            raise UserError(
                f"num_buckets={self.num_buckets} must be at least 4, and max_distance={self.max_distance} above half "
                "of it"
            )

    @classmethod
    def small(cls, vocab_size: int | None = 32_128, *, pad_id: int | None = 0) -> "T5Config":
        """T5-small: 60,506,624 parameters."""
        return cls(
            vocab_size=vocab_size,
            d_model=512,
            num_heads=8,
            head_size=64,
            d_ff=2048,
            num_encoder_layers=6,
            num_decoder_layers=6,
            dropout_rate=0.1,
            activation="relu",
            gated=False,
            norm_epsilon=1e-6,
            num_buckets=32,
            max_distance=128,
            tie_embeddings=True,
            scale_output=True,
            max_length=512,
            pad_id=pad_id,
        )

    @classmethod
    def base(cls, vocab_size: int | None = 32_128, *, pad_id: int | None = 0) -> "T5Config":
        """T5-base: 222,903,552 parameters."""
        small = cls.small(vocab_size, pad_id=pad_id)
        return replace(small, d_model=768, num_heads=12, d_ff=3072, num_encoder_layers=12, num_decoder_layers=12)

    def v1_1(self, *, d_ff: int) -> "T5Config":
        """The same size of the second version, whose gated feed-forward network is narrower."""
        return replace(self, activation="gelu_tanh", gated=True, tie_embeddings=False, scale_output=False, d_ff=d_ff)


class T5(EncoderDecoder):
    """Source and target ids to logits. `T5(T5Config.small(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id are the tokenizer's to say; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(1.0), rngs=rngs)
        self.encoder = _T5Stack(config, config.num_encoder_layers, decoder=False, rngs=rngs)
        if config.num_decoder_layers:
            self.decoder = _T5Stack(config, config.num_decoder_layers, decoder=True, rngs=rngs)
        if config.lm_head and not config.tie_embeddings:
            self.output = Embedding(config.vocab_size, config.d_model, rngs=rngs)

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        self._check_decoder(tokens=tokens)
        x, state = self.decoder.go_on(self._embed(tokens), state)
        return self.logits(x), state

    def _encode(
        self, source: Array, segments: Segments | None = None, key: Array | None = None, watch: bool = False
    ) -> tuple[Array, Seen]:
        valid = self._valid(source)
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments[0])
        return self.encoder(self._embed(source), mask=mask, valid=valid, dropout_key=key, watch=watch)

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: Segments | None = None,
        key: Array | None = None,
        watch: bool = False,
    ) -> tuple[Array, Seen]:
        mask, memory_mask = causal(), padding(self._valid(source))
        # A target begins with the padding id, which is a token there.
        valid = self._valid(target).at[:, 0].set(True)
        if segments is not None:
            mask &= same_segment(segments[1])
            memory_mask &= same_segment(segments[1], segments[0])
            valid |= (segment_positions(segments[1]) == 0) & (segments[1] > 0)
        x = self._embed(target)
        return self.decoder(x, memory, mask=mask, memory_mask=memory_mask, valid=valid, dropout_key=key, watch=watch)

    def _decoder_blocks(self) -> Block:
        return self.decoder.layers.blocks

    def _embed(self, ids: Array) -> Array:
        return self.embedding(ids).astype(compute_dtype(self.config.dtype))

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        check_head(self.config)
        x = x * self.config.d_model**-0.5 if self.config.scale_output else x
        logits = (self.embedding if self.config.tie_embeddings else self.output).logits(x)
        return constrain(logits, "batch", "length", "vocab")


class _T5Stack(nnx.Module):
    """Layers that share one table of biases for the distances of queries and keys, then a norm."""

    def __init__(self, config: T5Config, num_layers: int, *, decoder: bool, rngs: nnx.Rngs):
        def attention(rngs: nnx.Rngs) -> MultiHeadAttention:
            return MultiHeadAttention(
                config.d_model,
                config.num_heads,
                config.dropout_rate,
                head_size=config.head_size,
                bias=False,
                scale=1.0,
                scheme=fan_in_normal,
                rngs=rngs,
            )

        experts = config.experts and (config.experts.for_decoder() if decoder else config.experts)

        def feed_forward(rngs: nnx.Rngs) -> FeedForward | Experts:
            return feed_forward_or_experts(
                config.d_model,
                config.d_ff,
                experts,
                config.activation,
                config.dropout_rate,
                gated=config.gated,
                bias=False,
                scheme=fan_in_normal,
                rngs=rngs,
            )

        def block(rngs: nnx.Rngs) -> Block:
            return Block(
                attention(rngs),
                feed_forward(rngs),
                cross_attention=attention(rngs) if decoder else None,
                norm=lambda: RMSNorm(config.d_model, config.norm_epsilon, rngs=rngs),
                placement="pre",
                dropout_rate=config.dropout_rate,
            )

        axes = {"buckets": config.num_buckets, "heads": config.num_heads}
        self.distance_bias = parameter(rngs, axes, normal(config.d_model**-0.5), decay=False)
        self.layers: Stack[Block] = Stack(
            block, num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs
        )
        self.norm = RMSNorm(config.d_model, config.norm_epsilon, rngs=rngs)
        self.config, self.is_decoder = config, decoder

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"] | None = None,
        *,
        mask: Mask,
        memory_mask: Mask | None = None,
        valid: Bool[Array, "B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
        watch: bool = False,
    ) -> tuple[Float[Array, "B T D"], Seen]:
        first_key, key, last_key = split(dropout_key, 3)
        bias = self._bias(0, x.shape[1], x.shape[1])

        def layer(block, x, _, key):
            x, _, seen = block(x, memory, mask=mask, bias=bias, memory_mask=memory_mask, valid=valid, dropout_key=key)
            return x, seen if watch else seen.unwatched()

        x, seen = self.layers(layer, dropout(x, self.config.dropout_rate, first_key), dropout_key=key)
        return dropout(self.norm(x), self.config.dropout_rate, last_key), seen

    def go_on(self, x: Float[Array, "B T D"], state: DecodingState) -> tuple[Float[Array, "B T D"], DecodingState]:
        """What comes of the next positions, after those that the state remembers."""
        start = state.position
        memory_mask = padding(state.source_valid)  # type: ignore[arg-type]
        mask, bias = causal(offset=start), self._bias(start, x.shape[1], state.capacity)

        def layer(block, x, cache_and_memory, key):
            cache, memory = cache_and_memory
            x, cache, _ = block(x, memory, mask=mask, bias=bias, memory_mask=memory_mask, cache=cache, start=start)
            return x, cache

        x, cache = self.layers(layer, x, per_layer=(state.cache, state.memory))
        return self.norm(x), replace(state, cache=cache, position=start + x.shape[1])

    def _bias(self, start: Array | int, num_queries: int, num_keys: int) -> Float[Array, "1 N T S"]:
        """What is added to the scores for the distance of key and query; the first query is at `start`."""
        ahead = jnp.arange(num_keys)[None, :] - (start + jnp.arange(num_queries))[:, None]
        buckets = relative_buckets(
            ahead,
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
            two_sided=not self.is_decoder,
        )
        return jnp.moveaxis(self.distance_bias[...][buckets], -1, 0)[None]
