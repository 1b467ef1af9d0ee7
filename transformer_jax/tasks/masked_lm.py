"""Masked language modelling with next-sentence prediction, as BERT is trained (Devlin et al. 2019, section 3.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import chunked_sums, cross_entropy
from transformer_jax.models import Bert, BertConfig
from transformer_jax.tasks.abilities import AttentionMap, attention_map, check_texts, listed_tokens
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import perplexity
from transformer_jax.tasks.sentence_rows import SentenceRows, SentenceRowsConfig
from transformer_jax.tasks.task import Loss, LossTerm, Metrics, Results, Task, TaskConfig

MASK = "[MASK]"
"""What a mask may be written as, whatever the tokenizer calls it."""
AT_ONCE = 8  # positions of a row whose logits are in memory


@dataclass(frozen=True)
class MaskedLMConfig(TaskConfig):
    """Tokens that were masked, and whether a text follows another: for a Bert. A line of a document is a sentence."""

    rate: float = 0.15
    """Fraction of the tokens that are predicted; of these 80 % are masked, 10 % stay and 10 % are replaced."""
    whole_words: bool = False
    """Mask all tokens of a word together."""
    next_sentence: bool = True
    """Give two texts and predict whether the second follows the first; otherwise a row is one text (RoBERTa)."""

    fields: ClassVar = ("text",)
    text_fields: ClassVar = ("text",)
    models: ClassVar = (BertConfig,)
    decides: ClassVar = ("heads",)

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise UserError(f"rate must be over 0 and below 1; got {self.rate}")

    def num_extra_ids(self, processor: Tokenizer) -> int:
        """Number of ids that the model needs beside those of the tokenizer: the mask, if it has none."""
        return 0 if processor.mask_id is not None else 1

    def adapt(self, model: BertConfig, records: Sequence[Document]) -> BertConfig:
        """With the heads that are trained."""
        needed = ("pooler", "masked_lm", "next_sentence") if self.next_sentence else ("masked_lm",)
        return replace(model, heads=needed)  # type: ignore[arg-type]

    def build(self, processor: Tokenizer, model: BertConfig, batching: BatchingConfig) -> "MaskedLM":
        """The task with a run's tokenizer, for a model of this config."""
        if model.max_length < 8:
            raise UserError(f"model.max_length={model.max_length} has no room for two texts; give at least 8")
        return MaskedLM(self, processor, batching, model.max_length)


@dataclass(frozen=True)
class MaskedLM(Task):
    """Rows of one or two texts, of which some tokens are masked."""

    config: MaskedLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row, special ones included."""

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a sentence."""
        return {"text": token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id)}

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
        """The sentences of each document, and an empty one after them."""
        documents = [[line for line in record["text"].split("\n") if line.strip()] for record in records]
        encoded = iter(self.tokenizer.encode([sentence for document in documents for sentence in document]))
        examples: list[Example] = []
        for document in documents:
            examples += [{"text": ids} for ids in (next(encoded) for _ in document) if ids]
            examples.append({"text": []})
        return examples

    def layout(self, examples: Store, *, training: bool) -> SentenceRows:
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

    def loss(self, model: Bert, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of the masked tokens, plus that of the pairs."""
        hidden = model(batch["ids"], batch["types"], valid=batch["valid"], dropout_key=key)

        def sums(logits, labels, weights):
            right = jnp.sum((jnp.argmax(logits, -1) == labels) * weights)
            return cross_entropy(logits, labels, weights)[0], right

        masked, weight = _take(hidden, batch["positions"]), jnp.sum(batch["weights"])
        total, right = chunked_sums(sums, masked, model.masked_lm, batch["labels"], batch["weights"])
        terms = {"masked_lm_loss": LossTerm(total, weight), "masked_lm_accuracy": LossTerm(right, weight, 0.0)}
        if self.config.next_sentence:
            is_pair = batch["weights"].sum(axis=1) > 0  # a row that only fills the batch up has no prediction
            pairs = model.next_sentence(hidden)
            total, weight = cross_entropy(pairs, batch["pair"], is_pair)
            right = jnp.sum((jnp.argmax(pairs, -1) == batch["pair"]) & is_pair)
            terms["next_sentence_loss"] = LossTerm(total, weight)
            terms["next_sentence_accuracy"] = LossTerm(right, weight, 0.0)
        return terms

    def score(self, results: Results) -> Metrics:
        """Perplexity of the masked tokens."""
        return {"perplexity": perplexity(results.means["masked_lm_loss"])}

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why the masks of each text cannot be filled, if they cannot."""
        return [self._problem(ids) for ids in self._masked(texts)]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """Each text with its masks filled by the most likely tokens."""
        check_texts(self, texts)
        rows = self._masked(texts)
        self.tokenizer.warn_if_unknown([ids[1:-1] for ids in rows], "texts")
        examples = [{"ids": ids} for ids in rows]
        found = predictor.over(MaskedLM._fill, examples, self._row_columns, max_length=self.max_length)
        return self.tokenizer.decode([filled[: len(ids)] for filled, ids in zip(found["ids"], rows, strict=True)])

    def samples(self, records: Sequence[Document], predictor: Predictor) -> list[dict[str, str]]:
        """Some of the texts with tokens masked, what the model takes these for, and what they are."""
        layout = self.layout(Store.of(self.encode(records), self.columns), training=False)
        found = predictor(MaskedLM._guess, layout, limit=len(records))
        rows = []
        for ids, valid, guesses, labels, weights in zip(*(found[name] for name in _SHOWN), strict=True):
            words = [listed_tokens(self.tokenizer, tokens[weights > 0]) for tokens in (guesses, labels)]
            rows.append({"text": self._shown(ids[valid]), "model": words[0], "reference": words[1]})
        return rows

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """A text with its masks, if any, filled, and what its tokens attend to."""
        (ids,) = self._masked([text])
        if len(ids) > self.max_length:
            raise UserError(f"the text has {len(ids)} tokens; the model reads at most {self.max_length}")
        (filled,) = self.write([text], predictor) if self.mask_id in ids else [""]
        tokens = [self.mask_token if id == self.mask_id else self.tokenizer.tokens([id])[0] for id in ids]
        room = {"max_length": self.max_length, "batch_rows": 1}
        found = predictor.over(MaskedLM._attention, [{"ids": ids}], self._row_columns, **room)
        return filled, [attention_map("encoder", found["weights"][0], tokens, tokens)]

    @property
    def _row_columns(self) -> dict[str, Column]:
        return {"ids": token_column(max(self.mask_id + 1, self.tokenizer.vocab_size), self.tokenizer.pad_id)}

    def _fill(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The most likely token at each mask: a few positions at a time, since logits are the largest array by far."""
        ids = batch["ids"]

        def guess(hidden: Float[Array, "B D"]) -> Int[Array, "B"]:
            return jnp.argmax(model.masked_lm(hidden[:, None])[:, 0, : self.tokenizer.vocab_size], axis=-1)

        hidden = jnp.moveaxis(model(ids, valid=batch["ids_segments"] > 0), 1, 0)
        guesses = jnp.moveaxis(jax.lax.map(guess, hidden, batch_size=AT_ONCE), 0, 1)
        return {"ids": jnp.where(ids == self.mask_id, guesses, ids)}

    def _guess(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The most likely token at each of the positions that are predicted, and what can be shown of a row."""
        hidden = model(batch["ids"], batch["types"], valid=batch["valid"])
        logits = model.masked_lm(_take(hidden, batch["positions"]))
        guesses = jnp.argmax(logits[:, :, : self.tokenizer.vocab_size], axis=-1)
        return {"guesses": guesses} | {name: batch[name] for name in _SHOWN if name != "guesses"}

    def _attention(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        return {"weights": jnp.moveaxis(model.attention(batch["ids"], valid=batch["ids_segments"] > 0), 1, 0)}

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

    def _problem(self, ids: Sequence[int]) -> str | None:
        if self.mask_id not in ids:
            return f"has no {self.mask_token} to be filled"
        if len(ids) > self.max_length:
            return f"has {len(ids)} tokens; the model reads at most {self.max_length}"
        return None

    def _shown(self, ids: np.ndarray) -> str:
        pieces = np.split(ids, np.flatnonzero(ids == self.mask_id))
        texts = self.tokenizer.decode([piece[piece != self.mask_id] for piece in pieces])
        return self.mask_token.join(texts)


_SHOWN = ("ids", "valid", "guesses", "labels", "weights")


def _take(hidden: Float[Array, "B T D"], positions: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    return jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
