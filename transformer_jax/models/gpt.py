"""The decoder of GPT-2 (Radford et al. 2019) and, by its config, of Llama (Touvron et al. 2023)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import RotaryScaling, causal, dropout, padding, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import (
    AuxiliaryOutputs,
    Block,
    ClassificationHead,
    Embedding,
    Experts,
    ExpertsConfig,
    FeedForward,
    LanguageModelHead,
    LayerNorm,
    MultiHeadAttention,
    Norm,
    Rematerialize,
    RMSNorm,
    Rotary,
    Stack,
    TaggingHead,
    balance_loss,
    feed_forward_or_experts,
    last_valid,
    normal,
    position_indices,
    same_normal,
)
from transformer_jax.models.checks import (
    check_head,
    check_heads,
    check_labels,
    check_output_layer,
    check_rates,
    check_room,
    check_sizes,
    check_tokens,
)
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.initialization import STANDARD_DEVIATION
from transformer_jax.models.precision import Precision, compute_dtype

GPTHead = Literal["classifier", "tagger"]


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """Config of a causal decoder. `small`, `medium`, `large` and `xl` are GPT-2; `llama` is Llama 7B."""

    adjustable: ClassVar[tuple[str, ...]] = (
        "dropout_rate",
        "attention_dropout_rate",
        "head_dropout_rate",
        "dtype",
        "rematerialize",
        "unroll",
    )

    vocab_size: int | None
    """Number of ids in the vocabulary; None takes that of the tokenizer."""
    d_model: int
    """Size of the vectors between layers."""
    num_heads: int
    """Number of attention heads."""
    d_ff: int
    """Size of the hidden layer of the feed-forward network."""
    num_layers: int
    """Number of layers."""
    max_length: int
    """Longest text in tokens, for learned positions and for generation."""
    dropout_rate: float
    """Probability of dropout on each sub-layer's output and on the embedded input."""
    attention_dropout_rate: float
    """Probability of dropout on the attention weights."""
    activation: Activation
    """Activation of the feed-forward network; gelu is the exact one, gelu_tanh its approximation (GPT-2)."""
    gated: bool
    """Whether the hidden layer of the feed-forward network is multiplied by a gate: SwiGLU, with silu (Llama)."""
    norm: Literal["layer", "rms"]
    """Norm before each sub-layer and after the last layer: LayerNorm (layer, GPT-2) or RMSNorm (rms, Llama)."""
    norm_epsilon: float
    """Small number added to the variance in each norm, against division by zero."""
    positions: Literal["learned", "rotary"]
    """How positions are encoded: by a learned table (GPT-2), or by rotating queries and keys (Llama)."""
    tie_embeddings: bool
    """Whether the embedding and the output layer share a table."""
    attention_bias: bool
    """Whether the projections of attention have a bias."""
    feed_forward_bias: bool
    """Whether the linear maps of the feed-forward network have a bias."""
    num_key_heads: int | None = None
    """Number of heads of keys and values, each shared by several query heads; None has one for each query head."""
    head_size: int | None = None
    """Size of an attention head; None is d_model / num_heads."""
    rotary_base: float = 10_000.0
    """Base of the frequencies of rotary positions."""
    rotary_scaling: RotaryScaling | None = None
    """How the frequencies of rotary positions are lowered for longer texts; None leaves them."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of each feed-forward network, with capacity_factor=None; None has one network."""
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
    heads: tuple[GPTHead, ...] = ()
    """Heads on top of the decoder besides the output layer. classifier: one of num_labels for the text, from its last
    token; tagger: one of num_labels for each token."""
    num_labels: int | None = None
    """Number of labels of the classifier and the tagger; a task takes it from its training set."""
    label_names: tuple[str, ...] = ()
    """Names of the labels, in their order; a task takes them from its training set."""
    head_dropout_rate: float = 0.0
    """Probability of dropout on the input of the classifier and the tagger."""

    def __post_init__(self):
        names = ("d_model", "num_heads", "num_key_heads", "head_size", "d_ff", "num_layers", "max_length")
        check_sizes(self, *names, "num_labels")
        check_rates(self, "dropout_rate", "attention_dropout_rate", "head_dropout_rate")
        for head in self.heads:
            if head not in get_args(GPTHead):
                raise UserError(f"heads has {head!r}; choose among {', '.join(get_args(GPTHead))}")
        check_labels(self)
        if self.head_size is None:
            check_heads(self.d_model, self.num_heads)
        if self.num_heads % (self.num_key_heads or 1):
            raise UserError(f"num_heads={self.num_heads} is not a multiple of num_key_heads={self.num_key_heads}")
        if self.experts is not None and self.experts.capacity_factor is not None:
            raise UserError(
                f"experts.capacity_factor={self.experts.capacity_factor} makes a token depend on those after it, and "
                "generation would compute another function than training; set it to None"
            )
        if self.positions == "rotary" and self.size_of_head % 2:
            raise UserError(f"a head has {self.size_of_head} features; rotary positions need an even number")

    def build(self, rngs: nnx.Rngs) -> "GPT":
        """The model of this config."""
        return GPT(self, rngs=rngs)

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
            raise UserError("vocab_size comes from the tokenizer; set it to make a model")
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, initializer=normal(STANDARD_DEVIATION), rngs=rngs)
        if config.positions == "learned":
            self.position_embedding = Embedding(
                config.max_length,
                config.d_model,
                axis="position",
                decay=False,
                initializer=normal(STANDARD_DEVIATION),
                rngs=rngs,
            )
        self.decoder = _stack(config, rngs=rngs)
        self.norm = _norm(config, rngs)
        if config.lm_head:
            self.lm_head = LanguageModelHead(
                config.d_model,
                config.vocab_size,
                tied=config.tie_embeddings,
                initializer=normal(STANDARD_DEVIATION),
                rngs=rngs,
            )
        shape, initializer = (config.d_model, config.num_labels or 0), same_normal(STANDARD_DEVIATION)
        if "classifier" in config.heads:
            self.classification_head = ClassificationHead(
                *shape, config.head_dropout_rate, bias=False, initializer=initializer, rngs=rngs
            )
        if "tagger" in config.heads:
            self.tagging_head = TaggingHead(*shape, config.head_dropout_rate, initializer=initializer, rngs=rngs)

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

    def hidden_and_balance(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
        """What `hidden` gives, and what unevenly used experts add to the sum of the losses."""
        x, auxiliary = self._run(ids, valid, segments, None, dropout_key)
        return x, balance_loss(auxiliary.balance, self.config.experts)

    def hidden(
        self,
        ids: Int[Array, "B T"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """A vector for each token: the input of the output layer and of the heads. The arguments are `__call__`'s."""
        return self._run(ids, valid, segments, positions, dropout_key)[0]

    def attention(self, ids: Int[Array, "B T"], *, valid: Array | None = None) -> Float[Array, "L B N T T"]:
        """The attention maps of every layer and head, from the same pass."""
        auxiliary = self._run(ids, valid, return_attention=True)[1]
        return auxiliary.self_attention  # type: ignore[return-value]

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The logits of what `hidden` gives."""
        check_output_layer(self.config)
        return self.lm_head(x, self.embedding)

    def classify(
        self,
        x: Float[Array, "B T D"],
        valid: Bool[Array, "B T"] | None = None,
        *,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B labels"]:
        """The logits of the label of the whole text, from what `hidden` gives for its last token.

        Args:
            x: the hidden states.
            valid: False for padding, on either side; None for no padding.
            dropout_key: one key per row, or None for no dropout.
        """
        check_head(self.config, "classifier")
        return self.classification_head(last_valid(x, valid), dropout_key=dropout_key)

    def tag(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T labels"]:
        """The logits of the label of each token, from what `hidden` gives for it: no token knows of those after it."""
        check_head(self.config, "tagger")
        return self.tagging_head(x, dropout_key=dropout_key)

    def _run(
        self,
        ids: Array,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
        key: Array | None = None,
        return_attention: bool = False,
    ) -> tuple[Array, AuxiliaryOutputs]:
        check_tokens(ids=ids, segments=segments, positions=positions)
        embedding_key, key = split(key, 2)
        mask = causal()
        if valid is not None:
            mask &= padding(valid)
        if segments is not None:
            mask &= same_segment(segments)
        if positions is None:
            positions = position_indices(ids.shape[1])[None] if segments is None else segment_positions(segments)

        def layer(block, x, _, key):
            x, _, auxiliary = block(x, mask=mask, positions=positions, valid=valid, dropout_key=key)
            return x, auxiliary if return_attention else auxiliary.without_attention()

        x, auxiliary = self.decoder(layer, self._embed(ids, positions, embedding_key), dropout_key=key)
        return self.norm(x), auxiliary

    def start(self, num_rows: int, length: int, row_starts: Int[Array, "B"] | None = None) -> DecodingState:
        """Room for `length` tokens, to be given to `decode`. Rows with left padding start where that ends."""
        config = self.config
        if config.positions == "learned":
            check_room(length, config.max_length, row_starts)
        shape = (config.num_layers, num_rows, length, config.num_key_heads or config.num_heads, config.size_of_head)
        return DecodingState.empty(shape, compute_dtype(config.dtype), row_starts=row_starts)

    def decode(self, tokens: Int[Array, "B T"], state: DecodingState) -> tuple[Float[Array, "B T V"], DecodingState]:
        """The logits after each of the T next tokens, and the state after them: `__call__`, piece by piece."""
        check_tokens(tokens=tokens)
        start, valid = state.position, None
        mask, positions = causal(offset=start), (start + jnp.arange(tokens.shape[1]))[None]
        if state.row_starts is not None:
            mask &= padding(jnp.arange(state.capacity)[None] >= state.row_starts[:, None])
            valid = positions >= state.row_starts[:, None]
            positions = jnp.maximum(positions - state.row_starts[:, None], 0)

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
    initializer = same_normal(STANDARD_DEVIATION)
    # Of the 2L terms that the residual connections add up, each begins that much smaller (Radford et al. 2019, 2.3).
    output_initializer = same_normal(STANDARD_DEVIATION / (2 * config.num_layers) ** 0.5)

    def attention(rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.d_model,
            config.num_heads,
            config.attention_dropout_rate,
            num_key_heads=config.num_key_heads,
            head_size=config.head_size,
            bias=config.attention_bias,
            rotary=Rotary(config.rotary_base, config.rotary_scaling) if config.positions == "rotary" else None,
            initializer=initializer,
            output_initializer=output_initializer,
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
            initializer=initializer,
            output_initializer=output_initializer,
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
