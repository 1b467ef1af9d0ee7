"""The encoder of BERT (Devlin et al. 2019) and, by its config, of RoBERTa (Liu et al. 2019) and DistilBERT."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import dropout, padding, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers import (
    AuxiliaryOutputs,
    Block,
    ClassificationHead,
    Embedding,
    FeedForward,
    LanguageModelHead,
    LayerNorm,
    MultiHeadAttention,
    PairHead,
    Pooler,
    Rematerialize,
    SpanHead,
    Stack,
    TaggingHead,
    normal,
    position_indices,
    same_normal,
)
from transformer_jax.models.checks import check_head, check_heads, check_labels, check_rates, check_sizes, check_tokens
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.initialization import STANDARD_DEVIATION
from transformer_jax.models.precision import Precision, compute_dtype

BertHead = Literal["pooler", "masked_lm", "next_sentence", "classifier", "tagger", "span"]


@dataclass(frozen=True)
class BertConfig(ModelConfig):
    """Config of a bidirectional encoder. `base` and `large` are BERT, with the heads that it is pretrained with."""

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
    """Number of attention heads; must divide d_model."""
    d_ff: int
    """Size of the hidden layer of the feed-forward network."""
    num_layers: int
    """Number of layers."""
    max_length: int
    """Longest text in tokens: the number of learned positions."""
    num_types: int
    """Number of token types that an embedding tells apart: 2 for the first and the second text (BERT), 1 (RoBERTa), or
    0 (DistilBERT)."""
    position_start: int
    """Position of the first token: 0 in BERT. In RoBERTa it is the one after pad_id; there padding has the position
    pad_id, and only tokens are counted."""
    dropout_rate: float
    """Probability of dropout on each sub-layer's output and on the embedded input."""
    attention_dropout_rate: float
    """Probability of dropout on the attention weights."""
    activation: Activation
    """Activation of the feed-forward network; gelu, the exact one, in BERT, RoBERTa and DistilBERT."""
    norm_epsilon: float
    """Small number added to the variance in each norm, against division by zero."""
    heads: tuple[BertHead, ...]
    """Heads on top of the encoder, which a task sets for what it trains. pooler: a vector for the whole text;
    masked_lm: which token was masked; next_sentence, on the pooler: whether the second text follows the first;
    classifier, on the pooler: one of num_labels for the text; tagger: one of num_labels for each token; span: the first
    and the last token of an answer."""
    pad_id: int | None
    """Id of padding, which is not attended to; None takes that of the tokenizer."""
    num_labels: int | None = None
    """Number of labels of the classifier and the tagger; a task takes it from its training set."""
    label_names: tuple[str, ...] = ()
    """Names of the labels, in their order; a task takes them from its training set."""
    head_dropout_rate: float | None = None
    """Probability of dropout on the input of the classifier, the tagger and the span head; None is dropout_rate for the
    first two, and 0 for the last."""
    pooler_activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the pooler: tanh in BERT and RoBERTa, relu in DistilBERT."""
    dtype: Precision = "auto"
    """Precision of the computation: bfloat16, float32, or auto, which is bfloat16 on TPU and GPU and float32 on CPU.
    The parameters are float32 in any case."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing (none), all activations of a layer (full), all but
    the results of matrix products (dots), or all but the results of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Number of layers that are compiled as one piece: more may make steps faster, and makes compilation slower."""

    def __post_init__(self):
        check_sizes(self, "d_model", "num_heads", "d_ff", "num_layers", "max_length", "num_labels")
        check_rates(self, "dropout_rate", "attention_dropout_rate", "head_dropout_rate")
        check_heads(self.d_model, self.num_heads)
        for head in self.heads:
            if head not in get_args(BertHead):
                raise UserError(f"heads has {head!r}; choose among {', '.join(get_args(BertHead))}")
            if head in ("next_sentence", "classifier") and "pooler" not in self.heads:
                raise UserError(f"the head {head!r} reads the pooler; add 'pooler' to heads")
        check_labels(self)

    def build(self, rngs: nnx.Rngs) -> "Bert":
        """The model of this config."""
        return Bert(self, rngs=rngs)

    @classmethod
    def base(cls, vocab_size: int | None = 30_522, *, pad_id: int | None = 0) -> "BertConfig":
        """BERT-base: 109,482,240 parameters with the pooler, 110,106,428 with both heads."""
        return cls(
            vocab_size=vocab_size,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            num_layers=12,
            max_length=512,
            num_types=2,
            position_start=0,
            dropout_rate=0.1,
            attention_dropout_rate=0.1,
            activation="gelu",
            norm_epsilon=1e-12,
            heads=("pooler", "masked_lm", "next_sentence"),
            pad_id=pad_id,
        )

    @classmethod
    def large(cls, vocab_size: int | None = 30_522, *, pad_id: int | None = 0) -> "BertConfig":
        """BERT-large: 335,141,888 parameters with the pooler."""
        return replace(cls.base(vocab_size, pad_id=pad_id), d_model=1024, num_heads=16, d_ff=4096, num_layers=24)


class Bert(nnx.Module):
    """Ids to a vector for each; the heads are methods on these. `Bert(BertConfig.base(), rngs=nnx.Rngs(0))`."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None or config.pad_id is None:
            raise UserError("vocab_size and pad_id come from the tokenizer; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id

        def embedding(num_ids: int, *, axis: str = "vocab", decay: bool = True) -> Embedding:
            initializer = normal(STANDARD_DEVIATION)
            return Embedding(num_ids, config.d_model, axis=axis, decay=decay, initializer=initializer, rngs=rngs)

        self.embedding = embedding(config.vocab_size)
        self.position_embedding = embedding(config.max_length + config.position_start, axis="position", decay=False)
        self.type_embedding = embedding(config.num_types, axis="type", decay=False) if config.num_types else None
        self.embedding_norm = LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs)
        self.encoder = _stack(config, rngs=rngs)
        self._make_heads(config, config.vocab_size, rngs)

    def _make_heads(self, config: BertConfig, vocab_size: int, rngs: nnx.Rngs) -> None:
        d_model, num_labels, initializer = config.d_model, config.num_labels or 0, same_normal(STANDARD_DEVIATION)
        rate = config.head_dropout_rate
        label_dropout_rate = config.dropout_rate if rate is None else rate
        if "pooler" in config.heads:
            self.pooler = Pooler(d_model, config.pooler_activation, initializer=initializer, rngs=rngs)
        if "masked_lm" in config.heads:
            self.lm_head = LanguageModelHead(
                d_model,
                vocab_size,
                tied=True,
                bias=True,
                transform=config.activation,
                norm_epsilon=config.norm_epsilon,
                transform_initializer=initializer,
                rngs=rngs,
            )
        if "next_sentence" in config.heads:
            self.next_sentence_head = PairHead(d_model, initializer=initializer, rngs=rngs)
        if "classifier" in config.heads:
            self.classification_head = ClassificationHead(
                d_model, num_labels, label_dropout_rate, initializer=initializer, rngs=rngs
            )
        if "tagger" in config.heads:
            self.tagging_head = TaggingHead(d_model, num_labels, label_dropout_rate, initializer=initializer, rngs=rngs)
        if "span" in config.heads:
            self.span_head = SpanHead(d_model, rate or 0.0, initializer=initializer, rngs=rngs)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        types: Int[Array, "B T"] | None = None,
        *,
        valid: Bool[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """A vector for each token.

        Args:
            ids: the text, or two of them, with the special tokens around them.
            types: the kind of each token: 0 and 1 for the first and the second text; all 0 by default.
            valid: False for padding; what is not pad_id by default.
            segments: which example each token belongs to, where a row holds several. They do not see each other.
            positions: of the tokens; counted as the config says by default.
            dropout_key: one key per row, or None for no dropout.
        """
        return self._encode(ids, types, valid, segments, positions, dropout_key)[0]

    def attention(
        self, ids: Int[Array, "B T"], types: Int[Array, "B T"] | None = None, *, valid: Array | None = None
    ) -> Float[Array, "L B N T T"]:
        """The attention maps of every layer and head, from the same pass."""
        auxiliary = self._encode(ids, types, valid, return_attention=True)[1]
        return auxiliary.self_attention  # type: ignore[return-value]

    def pool(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """A vector for the whole text, from that of its first token."""
        check_head(self.config, "pooler")
        return self.pooler(x)

    def masked_lm(self, x: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """The logits of the token that was masked, at each of the positions that x is of."""
        check_head(self.config, "masked_lm")
        return self.lm_head(x, self.embedding)

    def next_sentence(self, x: Float[Array, "B T D"]) -> Float[Array, "B 2"]:
        """The logits of whether the second text follows the first: 0 is that it does, 1 that it does not."""
        check_head(self.config, "next_sentence")
        return self.next_sentence_head(self.pool(x))

    def classify(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B labels"]:
        """The logits of the label of the whole text."""
        check_head(self.config, "classifier")
        return self.classification_head(self.pool(x), dropout_key=dropout_key)

    def tag(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T labels"]:
        """The logits of the label of each token."""
        check_head(self.config, "tagger")
        return self.tagging_head(x, dropout_key=dropout_key)

    def span(self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None) -> Float[Array, "B T 2"]:
        """The logits of each token to be the first and the last of an answer."""
        check_head(self.config, "span")
        return self.span_head(x, dropout_key=dropout_key)

    def _encode(
        self,
        ids: Array,
        types: Array | None = None,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
        key: Array | None = None,
        return_attention: bool = False,
    ) -> tuple[Array, AuxiliaryOutputs]:
        check_tokens(ids=ids, types=types, segments=segments, positions=positions)
        embedding_key, key = split(key, 2)
        valid = jnp.not_equal(ids, self.pad_id) if valid is None else valid
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments)

        def layer(block, x, _, key):
            x, _, auxiliary = block(x, mask=mask, dropout_key=key)
            return x, auxiliary if return_attention else auxiliary.without_attention()

        positions = self._positions(ids, segments) if positions is None else positions
        return self.encoder(layer, self._embed(ids, types, positions, embedding_key), dropout_key=key)

    def _positions(self, ids: Array, segments: Array | None) -> Array:
        start = self.config.position_start
        if segments is not None:
            return start + segment_positions(segments)
        if start == 0:
            return position_indices(ids.shape[1])[None]
        is_token = jnp.not_equal(ids, self.pad_id)
        return start - 1 + jnp.cumsum(is_token, axis=1) * is_token

    def _embed(self, ids: Array, types: Array | None, positions: Array, key: Array | None) -> Array:
        x = self.embedding(ids) + self.position_embedding(positions)
        if self.type_embedding is not None:
            x = x + self.type_embedding(jnp.zeros_like(ids) if types is None else types)
        x = self.embedding_norm(x).astype(compute_dtype(self.config.dtype))
        return dropout(x, self.config.dropout_rate, key)


def _stack(config: BertConfig, *, rngs: nnx.Rngs) -> Stack[Block]:
    initializer, dropout_rate = same_normal(STANDARD_DEVIATION), config.attention_dropout_rate

    def block(rngs: nnx.Rngs) -> Block:
        return Block(
            MultiHeadAttention(config.d_model, config.num_heads, dropout_rate, initializer=initializer, rngs=rngs),
            FeedForward(config.d_model, config.d_ff, config.activation, 0.0, initializer=initializer, rngs=rngs),
            norm=lambda: LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs),
            placement="post",
            dropout_rate=config.dropout_rate,
        )

    return Stack(block, config.num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
