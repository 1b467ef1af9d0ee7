"""The decoder of GPT-2 (Radford et al. 2019) and, by its config, of Llama (Touvron et al. 2023)."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import RotaryScaling, causal, dropout, padding, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import (
    Block,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    Norm,
    Rematerialize,
    RMSNorm,
    Rotary,
    Seen,
    Stack,
    balance_loss,
    feed_forward_or_experts,
    normal,
    places,
    same_normal,
)
from transformer_jax.models.checks import check_head, check_heads, check_rates, check_room, check_sizes, check_tokens
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.precision import Precision, compute_dtype
from transformer_jax.parallel.axes import constrain

DEVIATION = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a decoder that reads what it writes. `small` to `xl` are GPT-2; `llama` is the other kind."""

    vocab_size: int | None
    """Number of ids; None takes the tokenizer's."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Attention heads."""
    d_ff: int
    """Size inside the feed-forward network."""
    num_layers: int
    max_length: int
    """Longest text, for learned positions and for generation."""
    dropout_rate: float
    """On each sub-layer's output and on the embedded input."""
    attention_dropout_rate: float
    """On the attention weights."""
    activation: Activation
    """`gelu` is the exact one, `gelu_tanh` its approximation (GPT-2)."""
    gated: bool
    """Multiply what is inside the feed-forward network by a gate: SwiGLU with silu (Llama)."""
    norm: Literal["layer", "rms"]
    """Before each sub-layer, and after the last block."""
    norm_epsilon: float
    positions: Literal["learned", "rotary"]
    tie_embeddings: bool
    """One table for the input and the output layer."""
    attention_bias: bool
    """Whether the projections of attention have a bias,"""
    feed_forward_bias: bool
    """and those of the feed-forward network."""
    num_key_heads: int | None = None
    """Heads of keys and values, each shared by as many queries; None has one for each query."""
    head_size: int | None = None
    """Size of a head; None divides d_model among them."""
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    experts: ExpertsConfig | None = None
    """Experts in place of each feed-forward network; their capacity_factor must be None."""
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
        names = ("d_model", "num_heads", "num_key_heads", "head_size", "d_ff", "num_layers", "max_length")
        check_sizes(self, *names)
        check_rates(self, "dropout_rate", "attention_dropout_rate")
        if self.head_size is None:
            check_heads(self.d_model, self.num_heads)
        if self.num_heads % (self.num_key_heads or 1):
            raise UserError(f"num_heads={self.num_heads} is no multiple of num_key_heads={self.num_key_heads}")
        if self.experts is not None and self.experts.capacity_factor is not None:
            raise UserError(
                f"experts.capacity_factor={self.experts.capacity_factor} makes a token depend on those after it, and "
                "generation would compute another function than training; set it to None"
            )
        if self.positions == "rotary" and self.size_of_head % 2:
            raise UserError(f"a head has {self.size_of_head} features; rotary positions need an even number")

    @property
    def size_of_head(self) -> int:
        """Number of features of a head."""
        return self.head_size or self.d_model // self.num_heads

    @classmethod
    def small(cls, vocab_size: int | None = 50_257) -> "GPTConfig":
        """GPT-2 small: 124,439,808 parameters."""
        return cls(
            vocab_size=vocab_size,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            num_layers=12,
            max_length=1024,
            dropout_rate=0.1,
            attention_dropout_rate=0.1,
            activation="gelu_tanh",
            gated=False,
            norm="layer",
            norm_epsilon=1e-5,
            positions="learned",
            tie_embeddings=True,
            attention_bias=True,
            feed_forward_bias=True,
        )

    @classmethod
    def medium(cls, vocab_size: int | None = 50_257) -> "GPTConfig":
        """GPT-2 medium: 354,823,168 parameters."""
        return replace(cls.small(vocab_size), d_model=1024, num_heads=16, d_ff=4096, num_layers=24)

    @classmethod
    def large(cls, vocab_size: int | None = 50_257) -> "GPTConfig":
        """GPT-2 large: 774,030,080 parameters."""
        return replace(cls.small(vocab_size), d_model=1280, num_heads=20, d_ff=5120, num_layers=36)

    @classmethod
    def xl(cls, vocab_size: int | None = 50_257) -> "GPTConfig":
        """GPT-2 XL: 1,557,611,200 parameters."""
        return replace(cls.small(vocab_size), d_model=1600, num_heads=25, d_ff=6400, num_layers=48)

    @classmethod
    def llama(cls, vocab_size: int | None = 32_000) -> "GPTConfig":
        """Llama 7B: 6,738,415,616 parameters."""
        return cls(
            vocab_size=vocab_size,
            d_model=4096,
            num_heads=32,
            d_ff=11_008,
            num_layers=32,
            max_length=2048,
            dropout_rate=0.0,
            attention_dropout_rate=0.0,
            activation="silu",
            gated=True,
            norm="rms",
            norm_epsilon=1e-6,
            positions="rotary",
            tie_embeddings=False,
            attention_bias=False,
            feed_forward_bias=False,
        )


class GPT(nnx.Module):
    """Ids to the logits of each next one. `GPT(GPTConfig.small(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None:
            raise UserError("vocab_size is the tokenizer's to say; set it to make a model")
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(DEVIATION), rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(
                config.max_length,
                config.d_model,
                axis="position",
                decay=False,
                initializer=normal(DEVIATION),
                rngs=rngs,
            )
        self.decoder = _stack(config, rngs=rngs)
        self.norm = _norm(config, rngs)
        if config.lm_head and not config.tie_embeddings:
            self.output = Embedding(config.vocab_size, config.d_model, initializer=normal(DEVIATION), rngs=rngs)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of each next token, given it and those before it.

        Args:
            ids: the text.
            valid: False for padding, which is not attended to.
            segments: which text each token belongs to, where a row holds several. They do not see each other.
            positions: of the tokens; counted from 0, in each segment anew, by default.
            dropout_key: one key per row, or None for no dropout.
        """
        return self.logits(self._run(ids, valid, segments, positions, dropout_key)[0])

    def logits_and_balance(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Float[Array, ""]]:
        """The logits, and what unevenly used experts add to the sum of the losses."""
        x, seen = self._run(ids, valid, segments, None, dropout_key)
        return self.logits(x), balance_loss(seen.balance, self.config.experts)

    def hidden(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """A vector for each token: what the logits are made of."""
        return self._run(ids, valid, segments, positions)[0]

    def attention(self, ids: Int[Array, "B T"], *, valid: Array | None = None) -> Float[Array, "L B N T T"]:
        """What attends to what, in every layer and head of the same pass."""
        return self._run(ids, valid, watch=True)[1].own  # type: ignore[return-value]

    def _run(
        self,
        ids: Array,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
        key: Array | None = None,
        watch: bool = False,
    ) -> tuple[Array, Seen]:
        check_tokens(ids=ids, segments=segments, positions=positions)
        embedding_key, key = split(key, 2)
        mask = causal()
        if valid is not None:
            mask &= padding(valid)
        if segments is not None:
            mask &= same_segment(segments)
        if positions is None:
            positions = places(ids.shape[1])[None] if segments is None else segment_positions(segments)

        def layer(block, x, _, key):
            x, _, seen = block(x, mask=mask, positions=positions, valid=valid, dropout_key=key)
            return x, seen if watch else seen.unwatched()

        x, seen = self.decoder(layer, self._embed(ids, positions, embedding_key), dropout_key=key)
        return self.norm(x), seen

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        check_head(self.config)
        logits = (self.embedding if self.config.tie_embeddings else self.output).logits(x)
        return constrain(logits, "batch", "length", "vocab")

    def start(self, num_rows: int, length: int, begins: Int[Array, "B"] | None = None) -> DecodingState:
        """Room for `length` tokens, to be given to `decode`; rows padded on the left begin at later positions."""
        config = self.config
        if config.positions == "learned":
            check_room(length, config.max_length, begins)
        shape = (config.num_layers, num_rows, length, config.num_key_heads or config.num_heads, config.size_of_head)
        return DecodingState.empty(shape, compute_dtype(config.dtype), begins=begins)

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        check_tokens(tokens=tokens)
        start, valid = state.position, None
        mask, positions = causal(offset=start), (start + jnp.arange(tokens.shape[1]))[None]
        if state.begins is not None:
            mask &= padding(jnp.arange(state.capacity)[None] >= state.begins[:, None])
            valid = positions >= state.begins[:, None]
            positions = jnp.maximum(positions - state.begins[:, None], 0)

        def layer(block, x, cache, key):
            x, cache, _ = block(x, mask=mask, positions=positions, valid=valid, cache=cache, start=start)
            return x, cache

        x, cache = self.decoder(layer, self._embed(tokens, positions), per_layer=state.cache)
        return self.logits(self.norm(x)), replace(state, cache=cache, position=start + tokens.shape[1])

    def _embed(self, ids: Array, positions: Array, key: Array | None = None) -> Array:
        x = self.embedding(ids)
        if self.config.positions == "learned":
            x = x + self.position_embedding(positions)
        return dropout(x.astype(compute_dtype(self.config.dtype)), self.config.dropout_rate, key)


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> Norm:
    return (LayerNorm if config.norm == "layer" else RMSNorm)(config.d_model, config.norm_epsilon, rngs=rngs)


def _stack(config: GPTConfig, *, rngs: nnx.Rngs) -> Stack[Block]:
    scheme = same_normal(DEVIATION)
    # Of the 2L terms that the residual connections add up, each begins that much smaller (Radford et al. 2019, 2.3).
    output_scheme = same_normal(DEVIATION / (2 * config.num_layers) ** 0.5)

    def attention(rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.d_model,
            config.num_heads,
            config.attention_dropout_rate,
            num_key_heads=config.num_key_heads,
            head_size=config.head_size,
            bias=config.attention_bias,
            rotary=Rotary(config.rotary_base, config.rotary_scaling) if config.positions == "rotary" else None,
            scheme=scheme,
            output_scheme=output_scheme,
            rngs=rngs,
        )

    def feed_forward(rngs: nnx.Rngs) -> FeedForward | Experts:
        return feed_forward_or_experts(
            config.d_model,
            config.d_ff,
            config.experts,
            config.activation,
            0.0,
            gated=config.gated,
            bias=config.feed_forward_bias,
            scheme=scheme,
            output_scheme=output_scheme,
            rngs=rngs,
        )

    def block(rngs: nnx.Rngs) -> Block:
        return Block(
            attention(rngs),
            feed_forward(rngs),
            norm=lambda: _norm(config, rngs),
            placement="pre",
            dropout_rate=config.dropout_rate,
        )

    return Stack(block, config.num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
