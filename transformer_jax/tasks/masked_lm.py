"""Masked language modelling with next-sentence prediction, as BERT is trained (Devlin et al. 2019, section 3.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import Bert, BertConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.inference import bucket_width, first_batches, padded, text_batches, without_padding
from transformer_jax.tasks.sentence_rows import SentenceRows, SentenceRowsConfig
from transformer_jax.tasks.task import (
    Figures,
    Sums,
    Tick,
    Watched,
    listed,
    loss_and_perplexity,
    sum_over,
)

MASK = "[MASK]"
"""What a mask may be written as, whatever the tokenizer calls it."""
AT_ONCE = 8  # positions of a row whose logits are in memory


@dataclass(frozen=True)
class MaskedLMConfig:
    """Tokens that were masked, and whether a text follows another: for a Bert. A line of a document is a sentence."""

    rate: float = 0.15
    """Share of the tokens that are predicted. Of these 80 % are masked, 10 % stay, 10 % are replaced."""
    whole_words: bool = False
    """Mask all tokens of a word together."""
    next_sentence: bool = True
    """Give two texts and predict whether the second follows the first. Without, a row is one text (RoBERTa)."""

    fields: ClassVar = ("text",)
    models: ClassVar = (BertConfig,)

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise UserError(f"rate must be over 0 and below 1; got {self.rate}")

    def num_extra_ids(self, tokenizer: Tokenizer) -> int:
        """Ids that the model needs beside those of the tokenizer: the mask, if it has none."""
        return 0 if tokenizer.mask_id is not None else 1

    def build(self, tokenizer: Tokenizer, model: BertConfig, batching: BatchingConfig) -> "MaskedLM":
        """The task with this tokenizer, for a model of this config."""
        for head in ("masked_lm", *(("next_sentence",) if self.next_sentence else ())):
            if head not in model.heads:
                raise UserError(f"model.heads={model.heads} lack {head!r}, which the task trains; add it")
        if model.max_length < 8:
            raise UserError(f"model.max_length={model.max_length} has no room for two texts; give at least 8")
        return MaskedLM(self, tokenizer, batching, model.max_length)


@dataclass(frozen=True)
class MaskedLM:
    """How documents become batches, what the loss is, and how well a model does."""

    config: MaskedLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row, special ones included."""

    @property
    def mask_id(self) -> int:
        """What a masked token is replaced by."""
        return self.tokenizer.vocab_size if self.tokenizer.mask_id is None else self.tokenizer.mask_id

    @property
    def mask_token(self) -> str:
        """What it is written as in a text; "[MASK]" is understood too."""
        return self.tokenizer.mask_token or MASK

    @property
    def max_predictions(self) -> int:
        """Most tokens of a row that are predicted."""
        return max(1, round(self.max_length * self.config.rate))

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """The sentences of each document, `{"text": ids}`, and an empty one after them."""
        documents = [[line for line in record["text"].split("\n") if line.strip()] for record in records]
        encoded = iter(self.tokenizer.encode([sentence for document in documents for sentence in document]))
        examples: list[Example] = []
        for document in documents:
            examples += [{"text": ids} for ids in (next(encoded) for _ in document) if ids]
            examples.append({"text": []})
        return examples

    def layout(self, examples: Store) -> SentenceRows:
        """Texts of a few sentences of a document, or pairs of them."""
        tokenizer = self.tokenizer
        config = SentenceRowsConfig(
            length=self.max_length,
            batch_rows=self.batching.batch_rows(self.max_length),
            max_predictions=self.max_predictions,
            rate=self.config.rate,
            pairs=self.config.next_sentence,
            pad_id=tokenizer.pad_id,
            begin_id=tokenizer.begin_id,
            end_id=tokenizer.end_id,
            mask_id=self.mask_id,
            vocab_size=tokenizer.vocab_size,
        )
        return SentenceRows(examples, config, continues=tokenizer.continues() if self.config.whole_words else None)

    def loss(self, model: Bert, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Sums:
        """Cross-entropy of the masked tokens, and of the pairs: weighed so that the mean is the sum of both means."""
        sums = self._sums(model, batch, key)
        # The means have different numbers below them; there are about as many predictions in every row.
        return sums["loss"] + self.max_predictions * sums["pair_loss"], sums["tokens"]

    def sums(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The losses, and how many predictions there are and are right."""
        return self._sums(model, batch, None)

    def evaluate(
        self, model: Bert, records: Sequence[Document], strategy: Strategy, *, tick: Tick = lambda done: None
    ) -> Figures:
        """Loss and accuracy of the masked tokens, and of the pairs, over every document once."""
        layout = self.layout(Store.of(self.encode(list(records))))
        sums = sum_over(self, model, layout, strategy, num_records=len(records), tick=tick)
        figures = loss_and_perplexity(sums)
        figures["masked_match"] = sums["right"] / max(sums["tokens"], 1)
        if self.config.next_sentence:
            figures["pair_loss"] = sums["pair_loss"] / max(sums["pairs"], 1)
            figures["pair_match"] = sums["pairs_right"] / max(sums["pairs"], 1)
        return figures

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps the masks of each text from being filled, if anything does."""
        return [self._fault(ids) for ids in self._masked(texts)]

    def complete(self, model: Bert, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """Each text with its masks filled by the likeliest tokens."""
        rows = self._masked(texts)
        for text, ids in zip(texts, rows, strict=True):
            if fault := self._fault(ids):
                raise UserError(f"the text {text[:20]!r} {fault}")
        self.tokenizer.warn_if_unknown([ids[1:-1] for ids in rows], "texts")
        filled = [""] * len(texts)
        room = {"max_length": self.max_length, "pad_id": self.tokenizer.pad_id}
        for members, batch in text_batches(rows, self.batching, strategy, **room):
            guesses = np.asarray(_guesses(model, strategy.place(batch)["ids"], task=self))
            written = np.where(batch["ids"] == self.mask_id, guesses, batch["ids"])
            for member, ids in zip(members, written, strict=False):
                (filled[member],) = self.tokenizer.decode([ids[: len(rows[member])]])
        return filled

    def samples(self, model: Bert, records: Sequence[Document], strategy: Strategy) -> list[dict[str, str]]:
        """Some of the texts with tokens masked, what the model takes these for, and what they are."""
        rows = []
        for count, batch in first_batches(self.layout(Store.of(self.encode(records))), len(records), strategy):
            guesses = np.asarray(_chosen_guesses(model, strategy.place(batch), task=self))
            for row in range(count):
                chosen = batch["weights"][row] > 0
                shown = batch["ids"][row][batch["valid"][row]]
                names = (
                    self._shown(shown),
                    *(listed(self.tokenizer, ids[row][chosen]) for ids in (guesses, batch["labels"])),
                )
                rows.append(dict(zip(("text", "model", "reference"), names, strict=True)))
        return rows

    def attention(self, model: Bert, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """A text with its masks, if any, filled, and what its tokens attend to."""
        (ids,) = self._masked([text])
        if len(ids) > self.max_length:
            raise UserError(f"the text has {len(ids)} tokens; the model reads at most {self.max_length}")
        (filled,) = self.complete(model, [text], strategy) if self.mask_id in ids else [""]
        tokens = [self.mask_token if id == self.mask_id else self.tokenizer.tokens([id])[0] for id in ids]
        width = bucket_width(self.max_length, self.batching)
        row = padded(ids, width, max_length=self.max_length, pad_id=self.tokenizer.pad_id)
        return filled, [without_padding("encoder", _attention(model, row), tokens, tokens)]

    def _sums(self, model: Bert, batch: Mapping[str, Array], key: Array | None) -> dict[str, Array]:
        hidden = self._hidden(model, batch, key)
        logits = model.masked_lm(_take(hidden, batch["places"]))
        total, weight = cross_entropy(logits, batch["labels"], batch["weights"])
        right = jnp.sum((jnp.argmax(logits, -1) == batch["labels"]) * batch["weights"])
        sums = {"loss": total, "tokens": weight, "right": right, "pair_loss": jnp.zeros_like(total)}
        if self.config.next_sentence:
            is_pair = batch["weights"].sum(axis=1) > 0  # a row that only fills the batch up has no prediction
            pairs = model.next_sentence(hidden)
            sums["pair_loss"], sums["pairs"] = cross_entropy(pairs, batch["pair"], is_pair)
            sums["pairs_right"] = jnp.sum((jnp.argmax(pairs, -1) == batch["pair"]) & is_pair)
        return sums

    def _hidden(self, model: Bert, batch: Mapping[str, Array], key: Array | None = None) -> Array:
        return model(batch["ids"], batch["types"], valid=batch["valid"], dropout_key=key)

    def _masked(self, texts: Sequence[str]) -> list[list[int]]:
        begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
        if self.tokenizer.mask_token is not None:
            encoded = self.tokenizer.encode(texts, allow=(MASK, self.tokenizer.mask_token))
            return [[begin, *ids, end] for ids in encoded]
        rows = []
        for text in texts:
            *before, last = text.split(MASK)
            if self.tokenizer.spaces_begin_words:  # so one before a mask is part of what is masked
                before = [piece.rstrip(" ") for piece in before]
            pieces = self.tokenizer.encode([*before, last])
            inner = [id for piece in pieces for id in (self.mask_id, *piece)][1:]
            rows.append([begin, *inner, end])
        return rows

    def _fault(self, ids: Sequence[int]) -> str | None:
        if self.mask_id not in ids:
            return f"has no {self.mask_token} to be filled"
        if len(ids) > self.max_length:
            return f"has {len(ids)} tokens; the model reads at most {self.max_length}"
        return None

    def _shown(self, ids: np.ndarray) -> str:
        pieces = np.split(ids, np.flatnonzero(ids == self.mask_id))
        texts = self.tokenizer.decode([piece[piece != self.mask_id] for piece in pieces])
        return self.mask_token.join(texts)


def _take(hidden: Array, places: Array) -> Array:
    return jnp.take_along_axis(hidden, places[:, :, None], axis=1)


@partial(jax.jit, static_argnames="task")
def _guesses(model: Bert, ids: Int[Array, "B T"], task: MaskedLM) -> Int[Array, "B T"]:
    """The likeliest token at every position: a few at a time, since logits of all are the largest array by far."""

    def guess(hidden: Float[Array, "B D"]) -> Int[Array, "B"]:
        return jnp.argmax(model.masked_lm(hidden[:, None])[:, 0, : task.tokenizer.vocab_size], axis=-1)

    hidden = jnp.moveaxis(model(ids), 1, 0)
    return jnp.moveaxis(jax.lax.map(guess, hidden, batch_size=AT_ONCE), 0, 1)


@partial(jax.jit, static_argnames="task")
def _chosen_guesses(model: Bert, batch: dict[str, Array], task: MaskedLM) -> Int[Array, "B P"]:
    """The likeliest token at each of the positions that are predicted."""
    logits = model.masked_lm(_take(task._hidden(model, batch), batch["places"]))
    return jnp.argmax(logits[:, :, : task.tokenizer.vocab_size], axis=-1)


@jax.jit
def _attention(model: Bert, ids: Int[Array, "1 T"]) -> Float[Array, "L 1 N T T"]:
    return model.attention(ids)
