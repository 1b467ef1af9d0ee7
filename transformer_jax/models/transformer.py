"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from transformer_jax.errors import UserError
from transformer_jax.functional import causal, dropout, padding, segment_positions, sinusoidal
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.functional.positions import SinusoidVariant
from transformer_jax.layers import (
    Block,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    NormPlacement,
    Rematerialize,
    Seen,
    Stack,
    feed_forward_or_experts,
    parameter,
    places,
    zeros,
)
from transformer_jax.models.checks import check_heads, check_rates, check_room, check_sizes, check_tokens
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.encoder_decoder import EncoderDecoder, Segments
from transformer_jax.models.precision import Precision, compute_dtype
from transformer_jax.parallel.axes import constrain


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of an encoder-decoder. `base` and `big` are the paper's (table 3)."""

    vocab_size: int | None
    """Number of ids; None takes the tokenizer's."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Attention heads; divides d_model."""
    d_ff: int
    """Size inside the feed-forward network."""
    num_encoder_layers: int
    num_decoder_layers: int
    dropout_rate: float
    """On each sub-layer's output and on the embedded input, as in the paper (5.4)."""
    attention_dropout_rate: float
    """On the attention weights; the paper has none."""
    activation_dropout_rate: float
    """Inside the feed-forward network; the paper has none."""
    activation: Activation
    """`gelu` is the exact one, `gelu_tanh` its approximation."""
    norm: NormPlacement
    """`post` is the paper's norm after each residual sum; `pre` normalizes what enters a sub-layer."""
    norm_epsilon: float
    positions: Literal["sinusoidal", "learned"]
    max_length: int
    """Longest sequence for learned positions, and for generation."""
    tie_embeddings: Literal["all", "target", "none"]
    """Which share a table: source, target and output layer (3.4), the last two, or none."""
    pad_id: int | None
    """The id that is not attended to; None takes the tokenizer's."""
    source_vocab_size: int | None = None
    """Number of ids of the source, where that has a vocabulary of its own."""
    sinusoids: SinusoidVariant = "interleaved"
    """The order of the sines and cosines: the paper's, or as Marian and OpenNMT (halved) or tensor2tensor have it."""
    position_start: int = 0
    """What the first position counts as."""
    scale_embedding: bool = True
    """Multiply the embedding by sqrt(d_model) (3.4)."""
    output_bias: bool = False
    """Add a learned number to the logit of each id."""
    decoder_num_heads: int | None = None
    """Attention heads of the decoder; None has as many as the encoder,"""
    decoder_d_ff: int | None = None
    """and the size inside its feed-forward network."""
    experts: ExpertsConfig | None = None
    """Experts in place of each feed-forward network."""
    dtype: Precision = "auto"
    """Precision of the computation; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are float32."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing, a layer's activations (full), all but the results
    of matrix products (dots), or all but those of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Layers that are compiled as one piece: steps may be faster, compilation is slower."""

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
        return replace(base, d_model=1024, num_heads=16, d_ff=4096, dropout_rate=0.3)


class Transformer(EncoderDecoder):
    """Source and target ids to logits. `Transformer(TransformerConfig.base(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id are the tokenizer's to say; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        d_model, vocab_size = config.d_model, config.vocab_size
        self.embedding = Embedding(config.source_vocab_size or vocab_size, d_model, rngs=rngs)
        if config.tie_embeddings != "all":
            self.target_embedding = Embedding(vocab_size, d_model, rngs=rngs)
        if config.tie_embeddings == "none":
            self.output = Embedding(vocab_size, d_model, rngs=rngs)
        self.output_bias = parameter(rngs, {"vocab": vocab_size}, zeros, decay=False) if config.output_bias else None
        if config.positions == "learned":
            learned = partial(Embedding, config.max_length, d_model, axis="position", decay=False)
            self.source_positions, self.target_positions = learned(rngs=rngs), learned(rngs=rngs)
        self.encoder = _stack(config, config.num_encoder_layers, cross_attention=False, rngs=rngs)
        self.decoder = _stack(config, config.num_decoder_layers, cross_attention=True, rngs=rngs)
        if config.norm == "pre":
            self.encoder_norm = LayerNorm(d_model, config.norm_epsilon, rngs=rngs)
            self.decoder_norm = LayerNorm(d_model, config.norm_epsilon, rngs=rngs)

    def start(self, source: Int[Array, "B S"], length: int) -> DecodingState:
        """Read the source and make room for `length` target tokens, to be given to `decode`."""
        if self.config.positions == "learned":
            check_room(length, self.config.max_length)
        return super().start(source, length)

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

    def _encode(
        self, source: Array, segments: Segments | None = None, key: Array | None = None, watch: bool = False
    ) -> tuple[Array, Seen]:
        embedding_key, key = split(key, 2)
        valid = self._valid(source)
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments[0])

        def layer(block, x, _, key):
            x, _, seen = block(x, mask=mask, valid=valid, dropout_key=key)
            return x, seen if watch else seen.unwatched()

        x = self._embed(source, side="source", segments=segments and segments[0], key=embedding_key)
        x, seen = self.encoder(layer, x, dropout_key=key)
        return self.encoder_norm(x) if self.config.norm == "pre" else x, seen

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: Segments | None = None,
        key: Array | None = None,
        watch: bool = False,
    ) -> tuple[Array, Seen]:
        embedding_key, key = split(key, 2)
        valid, mask, memory_mask = self._valid(target), causal(), padding(self._valid(source))
        if segments is not None:
            mask &= same_segment(segments[1])
            memory_mask &= same_segment(segments[1], segments[0])

        def layer(block, x, _, key):
            x, _, seen = block(x, memory, mask=mask, memory_mask=memory_mask, valid=valid, dropout_key=key)
            return x, seen if watch else seen.unwatched()

        x = self._embed(target, side="target", segments=segments and segments[1], key=embedding_key)
        x, seen = self.decoder(layer, x, dropout_key=key)
        return self.decoder_norm(x) if self.config.norm == "pre" else x, seen

    def _decoder_blocks(self) -> Block:
        return self.decoder.blocks

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
        table = self.embedding if side == "source" or config.tie_embeddings == "all" else self.target_embedding
        positions = start + places(ids.shape[1])
        if config.positions == "sinusoidal":
            encoding = sinusoidal(positions, config.d_model, variant=config.sinusoids, start=config.position_start)
        else:
            encoding = (self.source_positions if side == "source" else self.target_positions)(positions)
        encoding = encoding[None] if segments is None else encoding[segment_positions(segments)]
        x = table(ids) * (config.d_model**0.5 if config.scale_embedding else 1.0) + encoding
        return dropout(x.astype(compute_dtype(config.dtype)), config.dropout_rate, key)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        table = {"all": "embedding", "target": "target_embedding", "none": "output"}[self.config.tie_embeddings]
        logits = getattr(self, table).logits(x)
        if self.output_bias is not None:
            logits = logits + self.output_bias[None, None]
        return constrain(logits, "batch", "length", "vocab")


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
