"""The encoder of BERT (Devlin et al. 2019) and, by its config, of RoBERTa (Liu et al. 2019) and DistilBERT."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.errors import UserError
from transformer_jax.functional import dropout, padding, segment_positions
from transformer_jax.functional import segments as same_segment
from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation, activation_function
from transformer_jax.layers import (
    Block,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Rematerialize,
    Seen,
    Stack,
    normal,
    parameter,
    places,
    same_normal,
    zeros,
)
from transformer_jax.models.checks import check_heads, check_rates, check_sizes, check_tokens
from transformer_jax.models.precision import Precision, compute_dtype
from transformer_jax.parallel.axes import constrain

Head = Literal["pooler", "masked_lm", "next_sentence", "classifier", "tagger", "span"]

DEVIATION = 0.02


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder that reads both ways. `base` and `large` are BERT, with the heads it is trained with."""

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
    """Longest text: the positions that are learned."""
    num_types: int
    """Kinds of tokens that are told apart by an embedding: 2 for first and second text (BERT), 1 (RoBERTa), or none
    (DistilBERT)."""
    position_start: int
    """The position of the first token: 0 in BERT. In RoBERTa the one after pad_id; there padding has pad_id, and only
    tokens are counted."""
    dropout_rate: float
    """On each sub-layer's output and on the embedded input."""
    attention_dropout_rate: float
    """On the attention weights."""
    activation: Activation
    """`gelu`, the exact one, in all three."""
    norm_epsilon: float
    heads: tuple[Head, ...]
    """What is on top. `pooler`: a vector of the whole text; `masked_lm`: which token was masked; `next_sentence`, on
    the pooler: whether the second text follows the first; `classifier`, on the pooler: one of num_labels for the text;
    `tagger`: one for each token; `span`: which token an answer begins and which it ends with."""
    pad_id: int | None
    """The id that is not attended to; None takes the tokenizer's."""
    num_labels: int | None = None
    """Labels of the classifier and the tagger,"""
    label_names: tuple[str, ...] = ()
    """and what they are called, if they have names."""
    head_dropout_rate: float | None = None
    """On what the classifier, the tagger or the span head reads; None is dropout_rate for the first two, and none for
    the last."""
    pooler_activation: Literal["tanh", "relu"] = "tanh"
    """tanh in BERT and RoBERTa, relu in DistilBERT."""
    dtype: Precision = "auto"
    """Precision of the computation; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are float32."""
    rematerialize: Rematerialize = "none"
    """What the backward pass computes again to save memory: nothing, a layer's activations (full), all but the results
    of matrix products (dots), or all but those of products with weights (dots_without_batch)."""
    unroll: int = 1
    """Layers that are compiled as one piece: steps may be faster, compilation is slower."""

    def __post_init__(self):
        check_sizes(self, "d_model", "num_heads", "d_ff", "num_layers", "max_length", "num_labels")
        check_rates(self, "dropout_rate", "attention_dropout_rate", "head_dropout_rate")
        check_heads(self.d_model, self.num_heads)
        for head in self.heads:
            if head not in get_args(Head):
                raise UserError(f"heads has {head!r}; choose among {', '.join(get_args(Head))}")
            if head in ("next_sentence", "classifier") and "pooler" not in self.heads:
                raise UserError(f"the head {head!r} reads the pooler; add 'pooler' to heads")
            if head in ("classifier", "tagger") and self.num_labels is None:
                raise UserError(f"the head {head!r} needs num_labels")
        if self.label_names and len(self.label_names) != self.num_labels:
            raise UserError(f"num_labels={self.num_labels}, but there are {len(self.label_names)} label_names")

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
            raise UserError("vocab_size and pad_id are the tokenizer's to say; set both to make a model")
        self.config = config
        self.pad_id: int = config.pad_id

        def embedding(num_ids: int, *, axis: str = "vocab", decay: bool = True) -> Embedding:
            deviation = normal(DEVIATION)
            return Embedding(num_ids, config.d_model, axis=axis, decay=decay, initializer=deviation, rngs=rngs)

        def linear(num_outputs: int, *, axis: str = "labels") -> Linear:
            return Linear({"embed": config.d_model}, {axis: num_outputs}, scheme=same_normal(DEVIATION), rngs=rngs)

        self.embedding = embedding(config.vocab_size)
        self.position_embedding = embedding(config.max_length + config.position_start, axis="position", decay=False)
        self.type_embedding = embedding(config.num_types, axis="type", decay=False) if config.num_types else None
        self.embedding_norm = LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs)
        self.encoder = _stack(config, rngs=rngs)
        if "pooler" in config.heads:
            self.pooler = linear(config.d_model, axis="pooled")
        if "masked_lm" in config.heads:
            self.transform = linear(config.d_model, axis="transformed")
            self.transform_norm = LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs)
            self.output_bias = parameter(rngs, {"vocab": config.vocab_size}, zeros, decay=False)
        if "next_sentence" in config.heads:
            self.next_sentence_output = linear(2)
        if "classifier" in config.heads:
            self.classifier_output = linear(config.num_labels or 0)
        if "tagger" in config.heads:
            self.tagger_output = linear(config.num_labels or 0)
        if "span" in config.heads:
            self.span_output = linear(2)

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
        """What attends to what, in every layer and head of the same pass."""
        return self._encode(ids, types, valid, watch=True)[1].own  # type: ignore[return-value]

    def pool(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """A vector for the whole text, from that of its first token."""
        self._check_head("pooler")
        activation = jnp.tanh if self.config.pooler_activation == "tanh" else activation_function("relu")
        return activation(self.pooler(x[:, 0]))

    def masked_lm(self, x: Float[Array, "B P D"]) -> Float[Array, "B P V"]:
        """The logits of the token that was masked, at each of the places that x is of."""
        self._check_head("masked_lm")
        hidden = self.transform_norm(activation_function(self.config.activation)(self.transform(x)))
        logits = self.embedding.logits(hidden) + self.output_bias[None, None]
        return constrain(logits, "batch", "length", "vocab")

    def next_sentence(self, x: Float[Array, "B T D"]) -> Float[Array, "B 2"]:
        """The logits of whether the second text follows the first: 0 is that it does, 1 that it does not."""
        self._check_head("next_sentence")
        return self.next_sentence_output(self.pool(x)).astype(jnp.float32)

    def classify(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B labels"]:
        """The logits of the label of the whole text."""
        self._check_head("classifier")
        pooled = dropout(self.pool(x), self._head_dropout_rate, dropout_key)
        return self.classifier_output(pooled).astype(jnp.float32)

    def tag(
        self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None
    ) -> Float[Array, "B T labels"]:
        """The logits of the label of each token."""
        self._check_head("tagger")
        return self.tagger_output(dropout(x, self._head_dropout_rate, dropout_key)).astype(jnp.float32)

    def span(self, x: Float[Array, "B T D"], *, dropout_key: Key[Array, "#B"] | None = None) -> Float[Array, "B T 2"]:
        """The logits of each token to be the first and the last of an answer."""
        self._check_head("span")
        return self.span_output(dropout(x, self.config.head_dropout_rate or 0.0, dropout_key)).astype(jnp.float32)

    @property
    def _head_dropout_rate(self) -> float:
        said = self.config.head_dropout_rate
        return self.config.dropout_rate if said is None else said

    def _check_head(self, head: Head) -> None:
        if head not in self.config.heads:
            there = ", ".join(self.config.heads) or "none"
            raise UserError(f"the model has no head {head!r} (its heads: {there}); make or load one with it in heads")

    def _encode(
        self,
        ids: Array,
        types: Array | None = None,
        valid: Array | None = None,
        segments: Array | None = None,
        positions: Array | None = None,
        key: Array | None = None,
        watch: bool = False,
    ) -> tuple[Array, Seen]:
        check_tokens(ids=ids, types=types, segments=segments, positions=positions)
        embedding_key, key = split(key, 2)
        valid = jnp.not_equal(ids, self.pad_id) if valid is None else valid
        mask = padding(valid)
        if segments is not None:
            mask &= same_segment(segments)

        def layer(block, x, _, key):
            x, _, seen = block(x, mask=mask, dropout_key=key)
            return x, seen if watch else seen.unwatched()

        positions = self._positions(ids, segments) if positions is None else positions
        return self.encoder(layer, self._embed(ids, types, positions, embedding_key), dropout_key=key)

    def _positions(self, ids: Array, segments: Array | None) -> Array:
        start = self.config.position_start
        if segments is not None:
            return start + segment_positions(segments)
        if start == 0:
            return places(ids.shape[1])[None]
        is_token = jnp.not_equal(ids, self.pad_id)
        return start - 1 + jnp.cumsum(is_token, axis=1) * is_token

    def _embed(self, ids: Array, types: Array | None, positions: Array, key: Array | None) -> Array:
        x = self.embedding(ids) + self.position_embedding(positions)
        if self.type_embedding is not None:
            x = x + self.type_embedding(jnp.zeros_like(ids) if types is None else types)
        x = self.embedding_norm(x).astype(compute_dtype(self.config.dtype))
        return dropout(x, self.config.dropout_rate, key)


def _stack(config: BertConfig, *, rngs: nnx.Rngs) -> Stack[Block]:
    scheme, dropout_rate = same_normal(DEVIATION), config.attention_dropout_rate

    def block(rngs: nnx.Rngs) -> Block:
        return Block(
            MultiHeadAttention(config.d_model, config.num_heads, dropout_rate, scheme=scheme, rngs=rngs),
            FeedForward(config.d_model, config.d_ff, config.activation, 0.0, scheme=scheme, rngs=rngs),
            norm=lambda: LayerNorm(config.d_model, config.norm_epsilon, rngs=rngs),
            placement="post",
            dropout_rate=config.dropout_rate,
        )

    return Stack(block, config.num_layers, rematerialize=config.rematerialize, unroll=config.unroll, rngs=rngs)
