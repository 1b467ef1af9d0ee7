"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import causal, dropout, padding, segment_positions, sinusoidal
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.functional.positions import SinusoidVariant
from transformer_jax.layers import (
    AuxiliaryOutputs,
    Block,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    LanguageModelHead,
    LayerNorm,
    MultiHeadAttention,
    NormPlacement,
    Rematerialize,
    Stack,
    balance_loss,
    feed_forward_or_experts,
    position_indices,
)
from transformer_jax.models.attention_weights import AttentionWeights
from transformer_jax.models.checks import check_heads, check_rates, check_room, check_sizes, check_tokens
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.precision import Precision, compute_dtype


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Config of an encoder-decoder. `base` and `big` are the paper's (table 3)."""

    adjustable: ClassVar[tuple[str, ...]] = (
        "dropout_rate",
        "attention_dropout_rate",
        "activation_dropout_rate",
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
    num_encoder_layers: int
    """Number of layers of the encoder."""
    num_decoder_layers: int
    """Number of layers of the decoder."""
    dropout_rate: float
    """Probability of dropout on each sub-layer's output and on the embedded input."""
    attention_dropout_rate: float
    """Probability of dropout on the attention weights; 0 in the paper."""
    activation_dropout_rate: float
    """Probability of dropout inside the feed-forward network; 0 in the paper."""
    activation: Activation
    """Activation of the feed-forward network; gelu is the exact one, gelu_tanh its approximation."""
    norm: NormPlacement
    """Where the norms are: after each residual sum (post, the paper), or before each sub-layer (pre)."""
    norm_epsilon: float
    """Small number added to the variance in each norm, against division by zero."""
    positions: Literal["sinusoidal", "learned"]
    """How positions are encoded: by sinusoids or by a learned table."""
    max_length: int
    """Longest sequence in tokens, for learned positions and for generation."""
    tie_embeddings: Literal["all", "target", "none"]
    """Which embeddings share a table: source, target and output layer (all, 3.4), target and output layer (target), or
    none."""
    pad_id: int | None
    """Id of padding, which is not attended to; None takes that of the tokenizer."""
    source_vocab_size: int | None = None
    """Number of ids of the source, where the source has a vocabulary of its own."""
    sinusoids: SinusoidVariant = "interleaved"
    """Order of the sines and cosines of sinusoidal positions: the paper's (interleaved), that of Marian and OpenNMT
    (halved), or that of tensor2tensor."""
    position_start: int = 0
    """Position of the first token, for sinusoidal positions."""
    scale_embedding: bool = True
    """Whether the embedding is multiplied by sqrt(d_model)."""
    output_bias: bool = False
    """Whether the output layer has a bias."""
    decoder_num_heads: int | None = None
    """Number of attention heads of the decoder; None takes that of the encoder."""
    decoder_d_ff: int | None = None
    """Size of the hidden layer of the decoder's feed-forward network; None takes that of the encoder."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of each feed-forward network; None has one network."""
    dtype: Precision = "auto"
    """Precision of the computation: bfloat16, float32, or auto, which is bfloat16 on TPU and GPU and float32 on CPU.
    The parameters are float32 in any case."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing (none), all activations of a layer (full), all but
    the results of matrix products (dots), or all but the results of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Number of layers that are compiled as one piece: more may make steps faster, and makes compilation slower."""

    def __post_init__(self):
        check_sizes(self, "d_model", "num_heads", "d_ff", "num_encoder_layers", "num_decoder_layers", "max_length")
        check_sizes(self, "decoder_num_heads", "decoder_d_ff")
        check_rates(self, "dropout_rate", "attention_dropout_rate", "activation_dropout_rate")
        check_heads(self.d_model, self.num_heads)
        check_heads(self.d_model, self.decoder_num_heads or self.num_heads)
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"d_model={self.d_model} is odd; sinusoidal positions need an even one")
        if self.positions == "learned" and (self.sinusoids != "interleaved" or self.position_start):
            raise UserError(
                f"sinusoids={self.sinusoids!r} and position_start={self.position_start} are of sinusoidal positions; "
                "leave them out with learned ones"
            )
        if self.source_vocab_size is not None and self.tie_embeddings == "all":
            raise UserError('a source with a vocabulary of its own cannot share its table; set tie_embeddings="target"')

    def build(self, rngs: nnx.Rngs) -> "Transformer":
        """The model of this config."""
        return Transformer(self, rngs=rngs)

    @classmethod
    def base(cls, vocab_size: int | None = 37_000, *, pad_id: int | None = 0) -> "TransformerConfig":
        """The base model: 63,082,496 parameters with a vocabulary of 37,000."""
        return cls(
            vocab_size=vocab_size,
            d_model=512,
            num_heads=8,
            d_ff=2048,
            num_encoder_layers=6,
            num_decoder_layers=6,
            dropout_rate=0.1,
            attention_dropout_rate=0.0,
            activation_dropout_rate=0.0,
            activation="relu",
            norm="post",
            norm_epsilon=1e-6,
            positions="sinusoidal",
            max_length=512,
            tie_embeddings="all",
            pad_id=pad_id,
        )

    @classmethod
    def big(cls, vocab_size: int | None = 37_000, *, pad_id: int | None = 0) -> "TransformerConfig":
        """The big model: 214,245,376 parameters with a vocabulary of 37,000; the dropout of English to German."""
        base = cls.base(vocab_size, pad_id=pad_id)
        # Of sentences, attention is next to nothing to compute again, and a tenth of all memory if it is kept.
        rematerialize: Rematerialize = "dots_without_batch"
        return replace(base, d_model=1024, num_heads=16, d_ff=4096, dropout_rate=0.3, rematerialize=rematerialize)


class Transformer(nnx.Module):
    """Source and target ids to logits. `Transformer(TransformerConfig.base(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id come from the tokenizer; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        d_model, vocab_size = config.d_model, config.vocab_size
        self.embedding = Embedding(config.source_vocab_size or vocab_size, d_model, rngs=rngs)
        if config.tie_embeddings != "all":
            self.target_embedding = Embedding(vocab_size, d_model, rngs=rngs)
        tied = config.tie_embeddings != "none"
        self.lm_head = LanguageModelHead(d_model, vocab_size, tied=tied, bias=config.output_bias, rngs=rngs)
        if config.positions == "learned":
            learned = partial(Embedding, config.max_length, d_model, axis="position", decay=False)
            self.source_positions, self.target_positions = learned(rngs=rngs), learned(rngs=rngs)
        self.encoder = _stack(config, config.num_encoder_layers, cross_attention=False, rngs=rngs)
        self.decoder = _stack(config, config.num_decoder_layers, cross_attention=True, rngs=rngs)
        if config.norm == "pre":
            self.encoder_norm = LayerNorm(d_model, config.norm_epsilon, rngs=rngs)
            self.decoder_norm = LayerNorm(d_model, config.norm_epsilon, rngs=rngs)

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
            target: ids, of which the first is what targets begin with; position t of the result is the prediction for
                t + 1.
            segments: which pair each source and each target token belongs to, where a row holds several: 1, 2, ... and
                0 for padding. Pairs do not see each other, and positions count from the beginning of each.
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
        check_tokens(source=source, target=target, source_segments=segments and segments[0])
        encoder_key, decoder_key = split(dropout_key, 2)
        memory, encoder = self._encode(source, segments, encoder_key)
        x, decoder = self._decode(target, memory, source, segments, decoder_key)
        experts = self.config.experts
        balance = balance_loss(encoder.balance, experts) + balance_loss(decoder.balance, experts)
        return x, balance

    def hidden(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """A vector for each target token: the input of the output layer."""
        check_tokens(source=source, target=target)
        return self._decode(target, self.encode(source), source)[0]

    def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """A vector for each source token: what the decoder attends to."""
        check_tokens(source=source)
        return self._encode(source)[0]

    def attention(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> AttentionWeights:
        """The attention maps of every layer and head, from the same pass."""
        check_tokens(source=source, target=target)
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
        embedding_key, key = split(key, 2)
        valid = self._valid(source)
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments[0])

        def layer(block, x, _, key):
            x, _, auxiliary = block(x, mask=mask, valid=valid, dropout_key=key)
            return x, auxiliary if return_attention else auxiliary.without_attention()

        x = self._embed(source, side="source", segments=segments and segments[0], key=embedding_key)
        x, auxiliary = self.encoder(layer, x, dropout_key=key)
        return self.encoder_norm(x) if self.config.norm == "pre" else x, auxiliary

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: tuple[Array, Array] | None = None,
        key: Array | None = None,
        return_attention: bool = False,
    ) -> tuple[Array, AuxiliaryOutputs]:
        embedding_key, key = split(key, 2)
        valid, mask, memory_mask = self._valid(target), causal(), padding(self._valid(source))
        if segments is not None:
            mask &= same_segment(segments[1])
            memory_mask &= same_segment(segments[1], segments[0])

        def layer(block, x, _, key):
            x, _, auxiliary = block(x, memory, mask=mask, memory_mask=memory_mask, valid=valid, dropout_key=key)
            return x, auxiliary if return_attention else auxiliary.without_attention()

        x = self._embed(target, side="target", segments=segments and segments[1], key=embedding_key)
        x, auxiliary = self.decoder(layer, x, dropout_key=key)
        return self.decoder_norm(x) if self.config.norm == "pre" else x, auxiliary

    def _embed(
        self,
        ids: Array,
        *,
        side: Literal["source", "target"],
        start: Array | int = 0,
        segments: Array | None = None,
        key: Array | None = None,
    ) -> Array:
        """Embedding times sqrt(d_model), so that it weighs as much as the position added to it (3.4, 3.5)."""
        config = self.config
        table = self.embedding if side == "source" else self._target_embedding
        positions = start + position_indices(ids.shape[1])
        if config.positions == "sinusoidal":
            encoding = sinusoidal(positions, config.d_model, variant=config.sinusoids, start=config.position_start)
        else:
            encoding = (self.source_positions if side == "source" else self.target_positions)(positions)
        encoding = encoding[None] if segments is None else encoding[segment_positions(segments)]
        x = table(ids) * (config.d_model**0.5 if config.scale_embedding else 1.0) + encoding
        return dropout(x.astype(compute_dtype(config.dtype)), config.dropout_rate, key)

    @property
    def _target_embedding(self) -> Embedding:
        return self.embedding if self.config.tie_embeddings == "all" else self.target_embedding

    def _valid(self, ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        return jnp.not_equal(ids, self.pad_id)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        return self.lm_head(x, self._target_embedding)

    def start(self, source: Int[Array, "B S"], length: int) -> DecodingState:
        """Encode the source and make room for `length` target tokens, to be given to `decode`."""
        if self.config.positions == "learned":
            check_room(length, self.config.max_length)
        memory = self.encode(source)
        projected = jax.vmap(lambda block: block.cross_attention.project(memory))(self.decoder.blocks)
        num_layers, num_rows, _, num_heads, head_size = projected.key.shape
        shape = (num_layers, num_rows, length, num_heads, head_size)
        return DecodingState.empty(shape, memory.dtype, memory=projected, source_valid=self._valid(source))

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        check_tokens(tokens=tokens)
        start, mask = state.position, causal(offset=state.position)
        memory_mask = padding(state.source_valid)  # type: ignore[arg-type]

        def layer(block, x, cache_and_memory, key):
            cache, memory = cache_and_memory
            x, cache, _ = block(x, memory, mask=mask, memory_mask=memory_mask, cache=cache, start=start)
            return x, cache

        x = self._embed(tokens, side="target", start=start)
        x, cache = self.decoder(layer, x, per_layer=(state.cache, state.memory))
        x = self.decoder_norm(x) if self.config.norm == "pre" else x
        return self.logits(x), replace(state, cache=cache, position=start + tokens.shape[1])


def _stack(config: TransformerConfig, num_layers: int, *, cross_attention: bool, rngs: nnx.Rngs) -> Stack[Block]:
    num_heads, d_ff = config.num_heads, config.d_ff
    if cross_attention:
        num_heads, d_ff = config.decoder_num_heads or num_heads, config.decoder_d_ff or d_ff

    def attention(rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, num_heads, config.attention_dropout_rate, rngs=rngs)

    experts = config.experts and (config.experts.for_decoder() if cross_attention else config.experts)

    def feed_forward(rngs: nnx.Rngs) -> FeedForward | Experts:
        shape, dropout_rate = (config.d_model, d_ff), config.activation_dropout_rate
        return feed_forward_or_experts(*shape, experts, config.activation, dropout_rate, rngs=rngs)

    def block(rngs: nnx.Rngs) -> Block:
        return Block(
            attention(rngs),
            feed_forward(rngs),
            cross_attention=attention(rngs) if cross_attention else None,
            norm=lambda: LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs),
            placement=config.norm,
            dropout_rate=config.dropout_rate,
        )

    return Stack(block, num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
