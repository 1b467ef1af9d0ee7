"""Permutation language modelling: tokens in any order, as XLNet is trained (Yang et al. 2019, sections 2.2 to 2.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.data.batches import Batch, Bucket, Chance
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import XLNet, XLNetConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.inference import bucket_width, first_batches, padded, without_padding
from transformer_jax.tasks.permutation import permutation_masks, sample_targets
from transformer_jax.tasks.task import (
    Figures,
    Sums,
    Tick,
    Watched,
    listed,
    loss_and_perplexity,
    require_head,
    sum_over,
)

FUNCTIONAL = 2  # tokens after a text: its end, and the one that stands for all of it
WHOLE = 2  # the type of the latter


@dataclass(frozen=True)
class PermutationLMConfig:
    """Some tokens of a text, each given those that come before it in a random order: for an XLNet."""

    share: float = 6.0
    """One token in so many is predicted (the K of section 2.4)."""
    max_gram: int = 5
    """Most tokens that are predicted side by side."""

    fields: ClassVar = ("text",)
    models: ClassVar = (XLNetConfig,)

    def __post_init__(self):
        if self.share <= 1 or self.max_gram < 1:
            raise UserError(f"share={self.share} must be over 1 and max_gram={self.max_gram} at least 1")

    def num_extra_ids(self, tokenizer: Tokenizer) -> int:
        """Ids that the model needs beside those of the tokenizer."""
        return 0

    def build(self, tokenizer: Tokenizer, model: XLNetConfig, batching: BatchingConfig) -> "PermutationLM":
        """The task with this tokenizer, for a model of this config."""
        require_head(model.lm_head)
        if model.max_length < 8:
            raise UserError(f"model.max_length={model.max_length} is too short a text; give at least 8")
        return PermutationLM(self, tokenizer, batching, model.max_length)


@dataclass(frozen=True)
class PermutationLM:
    """How documents become batches, what the loss is, and how well a model does."""

    config: PermutationLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row, special ones included."""

    @property
    def num_predict(self) -> int:
        """Tokens of a full row that are predicted."""
        return max(1, round((self.max_length - FUNCTIONAL) / self.config.share))

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """Documents: `{"text": ids}`."""
        return [{"text": ids} for ids in self.tokenizer.encode([record["text"] for record in records])]

    def layout(self, examples: Store) -> "_PermutedRows":
        """The documents one after the other, in rows of which chance orders the tokens."""
        return _PermutedRows(examples, self)

    def loss(self, model: XLNet, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Sums:
        """Cross-entropy of the predicted tokens, as a sum and their number."""
        sums = self._sums(model, batch, key)
        return sums["loss"], sums["tokens"]

    def sums(self, model: XLNet, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The loss, and how many tokens are predicted and are right."""
        return self._sums(model, batch, None)

    def evaluate(
        self, model: XLNet, records: Sequence[Document], strategy: Strategy, *, tick: Tick = lambda done: None
    ) -> Figures:
        """Loss, perplexity and accuracy per predicted token over every text once."""
        layout = self.layout(Store.of(self.encode(list(records))))
        sums = sum_over(self, model, layout, strategy, num_records=len(records), tick=tick)
        return loss_and_perplexity(sums) | {"token_match": sums["right"] / max(sums["tokens"], 1)}

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """An XLNet that predicts in any order writes nothing by itself."""
        return ["cannot be completed: this model was trained to predict tokens within a text" for _ in texts]

    def complete(self, model: XLNet, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """Raise: there is nothing to write."""
        raise UserError(f"the text {texts[0][:20]!r} {self.faults(texts)[0]}")

    def samples(self, model: XLNet, records: Sequence[Document], strategy: Strategy) -> list[dict[str, str]]:
        """Texts, some of their tokens as the model predicts them, and as they are."""
        rows = []
        for count, batch in first_batches(self.layout(Store.of(self.encode(records))), len(records), strategy):
            guesses = np.asarray(_guesses(model, strategy.place(batch), task=self))
            for row in range(count):
                chosen = batch["weights"][row] > 0
                words = [listed(self.tokenizer, ids[row][chosen]) for ids in (guesses, batch["labels"])]
                (text,) = self.tokenizer.decode([batch["ids"][row]])
                rows.append({"text": text, "model": words[0], "reference": words[1]})
        return rows

    def attention(self, model: XLNet, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """What the tokens of a text attend to, all of which see each other."""
        (inner,) = self.tokenizer.encode([text])
        ids = [*inner, self.tokenizer.end_id, self.tokenizer.begin_id]
        width = bucket_width(self.max_length, self.batching)
        row = padded(ids, width, max_length=self.max_length, pad_id=self.tokenizer.pad_id, left=True)
        valid = np.arange(row.shape[1])[None] >= row.shape[1] - len(ids)
        tokens = self.tokenizer.tokens(ids)
        return "", [without_padding("content", _attention(model, row, valid), tokens, tokens, left=True)]

    def _logits(self, model: XLNet, batch: Mapping[str, Array], key: Array | None) -> Array:
        valid = batch["ids"] != self.tokenizer.pad_id
        return model.predict(
            batch["ids"], batch["places"], batch["types"], allowed=batch["allowed"], valid=valid, dropout_key=key
        )

    def _sums(self, model: XLNet, batch: Mapping[str, Array], key: Array | None) -> dict[str, Array]:
        logits = self._logits(model, batch, key)
        total, weight = cross_entropy(logits, batch["labels"], batch["weights"])
        right = jnp.sum((jnp.argmax(logits, -1) == batch["labels"]) * batch["weights"])
        return {"loss": total, "tokens": weight, "right": right}


class _PermutedRows:
    """A layout of documents one after the other: rows of text, end and whole, in an order of chance."""

    def __init__(self, store: Store, task: PermutationLM):
        self._task = task
        batch_rows = task.batching.batch_rows(task.max_length)
        length = task.max_length - FUNCTIONAL
        self._chunks = Chunks(store, length=length, batch_rows=batch_rows, pad_id=task.tokenizer.pad_id, overlap=0)
        self.buckets: list[Bucket] = self._chunks.buckets
        self.describe = self._chunks.describe

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones. Padding is on the left, as XLNet has it."""
        task, length = self._task, self._task.max_length
        texts = self._chunks.rows(bucket, numbers, count, chance)
        batch = {
            "ids": np.full((count, length), task.tokenizer.pad_id, np.int32),
            "types": np.zeros((count, length), np.int32),
            "allowed": np.zeros((count, length, length), bool),
            "places": np.zeros((count, task.num_predict), np.int32),
            "labels": np.zeros((count, task.num_predict), np.int32),
            "weights": np.zeros((count, task.num_predict), np.float32),
        }
        for place in range(len(numbers)):
            random = chance(place)
            text = texts["text"][place][texts["text_segments"][place] > 0]
            ids = np.concatenate([text, [task.tokenizer.end_id, task.tokenizer.begin_id]])
            functional = np.arange(len(ids)) >= len(text)
            num_predict = min(task.num_predict, max(1, round(len(text) / task.config.share)))
            chosen = sample_targets(functional, random, num_predict=num_predict, max_gram=task.config.max_gram)
            permuted = permutation_masks(chosen, functional, random)
            first = length - len(ids)
            batch["ids"][place, first:], batch["types"][place, -1] = ids, WHOLE
            batch["allowed"][place, first:, first:] = permuted.query
            found = len(permuted.places)
            batch["places"][place, :found] = first + permuted.places
            batch["labels"][place, :found] = ids[permuted.places]
            batch["weights"][place, :found] = 1
        return batch


@partial(jax.jit, static_argnames="task")
def _guesses(model: XLNet, batch: dict[str, Array], task: PermutationLM) -> Int[Array, "B P"]:
    return jnp.argmax(task._logits(model, batch, None), axis=-1)


@jax.jit
def _attention(model: XLNet, ids: Int[Array, "1 T"], valid: Bool[Array, "1 T"]) -> Float[Array, "L 1 N T T"]:
    types = jnp.zeros_like(ids).at[:, -1].set(WHOLE)
    return model.attention(ids, types, valid=valid)
