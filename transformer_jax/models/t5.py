"""The encoder-decoder of T5 (Raffel et al. 2020) and of its successors T5 v1.1 and Flan-T5."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import Mask, causal, dropout, padding, relative_buckets, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import (
    AuxiliaryOutputs,
    Block,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    LanguageModelHead,
    MultiHeadAttention,
    Rematerialize,
    RMSNorm,
    Stack,
    balance_loss,
    fan_in_normal,
    feed_forward_or_experts,
    normal,
    parameter,
)
from transformer_jax.models.attention_weights import AttentionWeights
from transformer_jax.models.checks import check_output_layer, check_rates, check_sizes, check_tokens
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.precision import Precision, compute_dtype


@dataclass(frozen=True)
class T5Config(ModelConfig):
    """Config of a T5. `small` and `base` are the first version; `v1_1` makes the second of either."""

    adjustable: ClassVar[tuple[str, ...]] = ("dropout_rate", "dtype", "rematerialize", "unroll")

    vocab_size: int | None
    """Number of ids in the vocabulary; None takes that of the tokenizer."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Number of attention heads."""
    head_size: int
    """Size of an attention head; all heads together need not have the size d_model."""
    d_ff: int
    """Size of the hidden layer of the feed-forward network."""
    num_encoder_layers: int
    """Number of layers of the encoder."""
    num_decoder_layers: int
    """Number of layers of the decoder; 0 for an encoder alone."""
    dropout_rate: float
    """Probability of dropout on each sub-layer's output, on the attention weights, inside the feed-forward network, and
    on the input and the output of each stack."""
    activation: Activation
    """Activation of the feed-forward network: relu in the first version, gelu_tanh in the second."""
    gated: bool
    """Whether the hidden layer of the feed-forward network is multiplied by a gate, as in the second version."""
    norm_epsilon: float
    """Small number added to the variance in each norm, against division by zero."""
    num_buckets: int
    """Number of groups of distances that attention tells apart."""
    max_distance: int
    """Distance in tokens from which on all distances are in the last group."""
    tie_embeddings: bool
    """Whether source, target and output layer share a table (first version), or the output layer has its own
    (second)."""
    scale_output: bool
    """Whether the input of the output layer is multiplied by 1 / sqrt(d_model), as in the first version of T5."""
    max_length: int
    """Longest text in tokens, for training and generation; the model itself has no limit."""
    pad_id: int | None
    """Id of padding, which is not attended to; None takes that of the tokenizer."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of each feed-forward network (Switch Transformer); None has one network."""
    lm_head: bool = True
    """Whether there is an output layer to the vocabulary; without one there are hidden states and no logits."""
    dtype: Precision = "auto"
    """Precision of the computation: bfloat16, float32, or auto, which is bfloat16 on TPU and GPU and float32 on CPU.
    The parameters are float32 in any case."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing (none), all activations of a layer (full), all but
    the results of matrix products (dots), or all but the results of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Number of layers that are compiled as one piece: more may make steps faster, and makes compilation slower."""

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

    def build(self, rngs: nnx.Rngs) -> "T5":
        """The model of this config."""
        return T5(self, rngs=rngs)

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


class T5(nnx.Module):
    """Source and target ids to logits. `T5(T5Config.small(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id come from the tokenizer; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(1.0), rngs=rngs)
        self.encoder = _T5Stack(config, config.num_encoder_layers, decoder=False, rngs=rngs)
        if config.num_decoder_layers:
            self.decoder = _T5Stack(config, config.num_decoder_layers, decoder=True, rngs=rngs)
        if config.lm_head:
            scale = config.d_model**-0.5 if config.scale_output else 1.0
            self.lm_head = LanguageModelHead(
                config.d_model, config.vocab_size, tied=config.tie_embeddings, scale=scale, rngs=rngs
            )

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        segments: tuple[Int[Array, "B S"], Int[Array, "B T"]] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of each next target token, given the source and the target tokens so far.

        Args:
            source: ids.
            target: ids, of which the first is the padding id, which targets begin with; position t of the result is
                the prediction for t + 1.
            segments: which pair each source and each target token belongs to, where a row holds several: 1, 2, ... and
                0 for padding. Pairs do not see each other, and distances count within each.
            dropout_key: one key per row, or None for no dropout.
        """
        return self.logits(self.hidden_and_balance(source, target, segments=segments, dropout_key=dropout_key)[0])

    def hidden_and_balance(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        segments: tuple[Int[Array, "B S"], Int[Array, "B T"]] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """What `logits` is of, with dropout, and what unevenly used experts add to the sum of the losses."""
        self._check_decoder(source=source, target=target, source_segments=segments and segments[0])
        encoder_key, decoder_key = split(dropout_key, 2)
        memory, encoder = self._encode(source, segments, encoder_key)
        x, decoder = self._decode(target, memory, source, segments, decoder_key)
        experts = self.config.experts
        balance = balance_loss(encoder.balance, experts) + balance_loss(decoder.balance, experts)
        return x, balance

    def hidden(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """A vector for each target token: the input of the output layer."""
        self._check_decoder(source=source, target=target)
        return self._decode(target, self.encode(source), source)[0]

    def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """A vector for each source token: what the decoder attends to."""
        check_tokens(source=source)
        return self._encode(source)[0]

    def attention(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> AttentionWeights:
        """The attention maps of every layer and head, from the same pass."""
        self._check_decoder(source=source, target=target)
        memory, encoder = self._encode(source, return_attention=True)
        _, decoder = self._decode(target, memory, source, return_attention=True)
        maps = (encoder.self_attention, decoder.self_attention, decoder.cross_attention)
        return AttentionWeights(*maps)  # type: ignore[arg-type]

    def _encode(
        self,
        source: Array,
        segments: tuple[Array, Array] | None = None,
        key: Array | None = None,
        return_attention: bool = False,
    ) -> tuple[Array, AuxiliaryOutputs]:
        valid = self._valid(source)
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments[0])
        x = self._embed(source)
        return self.encoder(x, mask=mask, valid=valid, dropout_key=key, return_attention=return_attention)

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: tuple[Array, Array] | None = None,
        key: Array | None = None,
        return_attention: bool = False,
    ) -> tuple[Array, AuxiliaryOutputs]:
        mask, memory_mask = causal(), padding(self._valid(source))
        # A target begins with the padding id, which is a token there.
        valid = self._valid(target).at[:, 0].set(True)
        if segments is not None:
            mask &= same_segment(segments[1])
            memory_mask &= same_segment(segments[1], segments[0])
            valid |= (segment_positions(segments[1]) == 0) & (segments[1] > 0)
        return self.decoder(
            self._embed(target),
            memory,
            mask=mask,
            memory_mask=memory_mask,
            valid=valid,
            dropout_key=key,
            return_attention=return_attention,
        )

    def _embed(self, ids: Array) -> Array:
        return self.embedding(ids).astype(compute_dtype(self.config.dtype))

    def _valid(self, ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        return jnp.not_equal(ids, self.pad_id)

    def _check_decoder(self, **arrays: Array | None) -> None:
        """Raise unless there is a decoder and these are token ids."""
        check_tokens(**arrays)
        if not self.config.num_decoder_layers:
            raise ValueError("the model is an encoder alone (num_decoder_layers=0); use its `encode`")

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        check_output_layer(self.config)
        return self.lm_head(x, self.embedding)

    def start(self, source: Int[Array, "B S"], length: int) -> DecodingState:
        """Encode the source and make room for `length` target tokens, to be given to `decode`."""
        self._check_decoder(source=source)
        memory = self.encode(source)
        projected = jax.vmap(lambda block: block.cross_attention.project(memory))(self.decoder.layers.blocks)
        num_layers, num_rows, _, num_heads, head_size = projected.key.shape
        shape = (num_layers, num_rows, length, num_heads, head_size)
        return DecodingState.empty(shape, memory.dtype, memory=projected, source_valid=self._valid(source))

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        self._check_decoder(tokens=tokens)
        x, state = self.decoder.decode(self._embed(tokens), state)
        return self.logits(x), state


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
                initializer=fan_in_normal,
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
                initializer=fan_in_normal,
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
        return_attention: bool = False,
    ) -> tuple[Float[Array, "B T D"], AuxiliaryOutputs]:
        first_key, key, last_key = split(dropout_key, 3)
        bias = self._bias(0, x.shape[1], x.shape[1])

        def layer(block, x, _, key):
            x, _, auxiliary = block(
                x, memory, mask=mask, bias=bias, memory_mask=memory_mask, valid=valid, dropout_key=key
            )
            return x, auxiliary if return_attention else auxiliary.without_attention()

        x, auxiliary = self.layers(layer, dropout(x, self.config.dropout_rate, first_key), dropout_key=key)
        return dropout(self.norm(x), self.config.dropout_rate, last_key), auxiliary

    def decode(self, x: Float[Array, "B T D"], state: DecodingState) -> tuple[Float[Array, "B T D"], DecodingState]:
        """The output at the next positions, given the cache of those before, and the state after them."""
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
        """The bias of the scores by the distance of key and query; the first query is at `start`."""
        ahead = jnp.arange(num_keys)[None, :] - (start + jnp.arange(num_queries))[:, None]
        buckets = relative_buckets(
            ahead,
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
            two_sided=not self.is_decoder,
        )
        return jnp.moveaxis(self.distance_bias[...][buckets], -1, 0)[None]
