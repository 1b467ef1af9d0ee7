"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al. 2017)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import causal, dropout, padding, segment_positions, sinusoidal
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import Block, Cache, Embedding, LayerNorm, Stack
from transformer_jax.layers.attention import empty_cache
from transformer_jax.layers.block import NormPlacement
from transformer_jax.parallel.axes import constrain

Precision = Literal["auto", "float32", "bfloat16"]
Segments = tuple[Int[Array, "B S"], Int[Array, "B T"]]


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of an encoder-decoder. `base` and `big` are the paper's (table 3)."""

    vocab_size: int | None
    """Number of ids, source and target together; None takes the tokenizer's."""
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
    tie_embeddings: bool
    """One table for source, target and output layer (3.4)."""
    pad_id: int | None
    """The id that is not attended to; None takes the tokenizer's."""
    dtype: Precision = "auto"
    """Precision of the computation; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are float32."""
    rematerialize: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""

    def __post_init__(self):
        for name in ("d_model", "num_heads", "d_ff", "num_encoder_layers", "num_decoder_layers", "max_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        if self.d_model % self.num_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.d_model % n == 0]
            raise UserError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; "
                f"set num_heads to a divisor such as {fitting[-1]}"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UserError(f"d_model={self.d_model} is odd; sinusoidal positions need an even one")

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
            tie_embeddings=True,
            pad_id=pad_id,
        )

    @classmethod
    def big(cls, vocab_size: int | None = 37_000, *, pad_id: int | None = 0) -> "TransformerConfig":
        """The big model: 214,245,376 parameters with a vocabulary of 37,000; the dropout of English to German."""
        base = cls.base(vocab_size, pad_id=pad_id)
        return replace(base, d_model=1024, num_heads=16, d_ff=4096, dropout_rate=0.3)


class AttentionWeights(NamedTuple):
    """The attention weights of every layer of a forward pass."""

    encoder: Float[Array, "L B N S S"]
    decoder: Float[Array, "L B N T T"]
    cross: Float[Array, "L B N T S"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """All that the next token depends on: what each layer remembers, and how many tokens there were."""

    cache: Cache
    source_valid: Bool[Array, "B S"]
    position: Int[Array, ""]

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return self.cache.own.key.shape[2]

    def repeat(self, count: int) -> "DecodingState":
        """Each row `count` times, next to each other."""
        cache = jax.tree.map(lambda x: jnp.repeat(x, count, axis=1), self.cache)
        return replace(self, cache=cache, source_valid=jnp.repeat(self.source_valid, count, axis=0))

    def reorder(self, rows: Int[Array, "B"]) -> "DecodingState":
        """Go on from other rows, each one of the same source: what comes from the encoder stays in place."""
        own = jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.cache.own)
        return replace(self, cache=self.cache._replace(own=own))


class Transformer(nnx.Module):
    """Source and target ids to logits. `Transformer(TransformerConfig.base(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id are the tokenizer's to say; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id
        self.embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if not config.tie_embeddings:
            self.target_embedding = Embedding(config.vocab_size, config.d_model, rngs=rngs)
            self.output = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        if config.positions == "learned":
            learned = partial(Embedding, config.max_length, config.d_model, axis="position", decay=False)
            self.source_positions, self.target_positions = learned(rngs=rngs), learned(rngs=rngs)
        self.encoder = _stack(config, config.num_encoder_layers, cross_attention=False, rngs=rngs)
        self.decoder = _stack(config, config.num_decoder_layers, cross_attention=True, rngs=rngs)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        *,
        segments: Segments | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of each next target token, given the source and the target tokens so far.

        Args:
            source: ids.
            target: ids, of which the first is the begin-of-sequence id; position t of the result is the prediction
                for t + 1.
            segments: which pair each source and each target token belongs to, where a row holds several. Pairs do not
                see each other, and positions count from the beginning of each.
            dropout_key: one key per row, or None for no dropout.
        """
        encoder_key, decoder_key = split(dropout_key, 2)
        memory, _ = self._encode(source, segments, encoder_key)
        return self._logits(self._decode(target, memory, source, segments, decoder_key)[0])

    def attention(self, source: Int[Array, "B S"], target: Int[Array, "B T"]) -> AttentionWeights:
        """What attends to what, in every layer and head of the same pass."""
        memory, encoder = self._encode(source, return_weights=True)
        _, decoder = self._decode(target, memory, source, return_weights=True)
        return AttentionWeights(encoder.own, decoder.own, decoder.memory)

    def encode(self, source: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """What the decoder reads of the source."""
        return self._encode(source)[0]

    def start(self, source: Int[Array, "B S"], length: int) -> DecodingState:
        """Read the source and make room for `length` target tokens, to be given to `decode`."""
        config = self.config
        memory = self.encode(source)
        head_size = config.d_model // config.num_heads
        own = empty_cache(len(source), length, config.num_heads, head_size, memory.dtype)
        own = jax.tree.map(lambda x: jnp.stack([x] * config.num_decoder_layers), own)
        known = jax.vmap(lambda block: block.cross_attention.project(memory))(self.decoder.blocks)
        return DecodingState(Cache(own, known), self._valid(source), jnp.int32(0))

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        x = self._embed(tokens, side="target", start=state.position)
        x, cache, _ = self.decoder(
            x,
            mask=causal(offset=state.position),
            memory_mask=padding(state.source_valid),
            cache=state.cache,
            position=state.position,
        )
        position = state.position + tokens.shape[1]
        return self._logits(x), replace(state, cache=cache, position=position)  # type: ignore[arg-type]

    def _encode(
        self, source: Array, segments: Segments | None = None, key: Array | None = None, return_weights: bool = False
    ) -> tuple[Array, Any]:
        embedding_key, key = split(key, 2)
        mask = padding(self._valid(source))
        if segments is not None:
            mask &= same_segment(segments[0])
        x = self._embed(source, side="source", segments=segments and segments[0], key=embedding_key)
        x, _, weights = self.encoder(x, mask=mask, dropout_key=key, return_weights=return_weights)
        return x, weights

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array,
        segments: Segments | None = None,
        key: Array | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Any]:
        embedding_key, key = split(key, 2)
        mask, memory_mask = causal(), padding(self._valid(source))
        if segments is not None:
            mask &= same_segment(segments[1])
            memory_mask &= same_segment(segments[1], segments[0])
        x = self._embed(target, side="target", segments=segments and segments[1], key=embedding_key)
        x, _, weights = self.decoder(
            x, memory, mask=mask, memory_mask=memory_mask, dropout_key=key, return_weights=return_weights
        )
        return x, weights

    def _valid(self, source: Array) -> Array:
        return jnp.not_equal(source, self.pad_id)

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
        table = self.embedding if side == "source" or config.tie_embeddings else self.target_embedding
        positions = start + jnp.arange(ids.shape[1])
        if config.positions == "sinusoidal":
            encoding = sinusoidal(positions, config.d_model)
        else:
            encoding = (self.source_positions if side == "source" else self.target_positions)(positions)
        encoding = encoding[None] if segments is None else encoding[segment_positions(segments)]
        x = table(ids) * config.d_model**0.5 + encoding
        return dropout(x.astype(_compute_dtype(config)), config.dropout_rate, key)

    def _logits(self, x: Array) -> Array:
        logits = (self.embedding if self.config.tie_embeddings else self.output).logits(x)
        return constrain(logits, "batch", "length", "vocab")


def _stack(config: TransformerConfig, num_layers: int, *, cross_attention: bool, rngs: nnx.Rngs) -> Stack:
    block = partial(
        Block,
        d_model=config.d_model,
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        activation=config.activation,
        norm=config.norm,
        norm_epsilon=config.norm_epsilon,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        activation_dropout_rate=config.activation_dropout_rate,
        cross_attention=cross_attention,
    )
    final_norm = LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs) if config.norm == "pre" else None
    return Stack(
        lambda rngs: block(rngs=rngs), num_layers, final_norm=final_norm, rematerialize=config.rematerialize, rngs=rngs
    )


def _compute_dtype(config: TransformerConfig) -> jnp.dtype:
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)
