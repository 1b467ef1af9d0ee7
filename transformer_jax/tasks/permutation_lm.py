"""Permutation language modelling: tokens in any order, as XLNet is trained (Yang et al. 2019, sections 2.2 to 2.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from transformer_jax.data.batches import Batch, RowRng
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import chunked_sums, cross_entropy
from transformer_jax.models import XLNet, XLNetConfig
from transformer_jax.tasks.abilities import AttentionMap, attention_map, listed_tokens
from transformer_jax.tasks.permutation import permutation_masks, sample_targets
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import perplexity
from transformer_jax.tasks.task import Loss, LossTerm, Metrics, Results, Task, TaskConfig

FUNCTIONAL = 2  # tokens after a text: its end, and the one that stands for all of it
SUMMARY_TYPE = 2  # of the latter


@dataclass(frozen=True)
class PermutationLMConfig(TaskConfig):
    """Some tokens of a text, each given those that come before it in a random order: for an XLNet."""

    predict_fraction: float = 1 / 6
    """Fraction of the tokens of a row that are predicted."""
    max_gram: int = 5
    """Most tokens that are predicted side by side."""

    fields: ClassVar = ("text",)
    text_fields: ClassVar = ("text",)
    models: ClassVar = (XLNetConfig,)

    def __post_init__(self):
        if not 0 < self.predict_fraction < 1 or self.max_gram < 1:
            raise UserError(
                f"predict_fraction={self.predict_fraction} must be between 0 and 1 and max_gram={self.max_gram} at "
                "least 1"
            )

    def adapt(self, model: XLNetConfig, records: Sequence[Document]) -> XLNetConfig:
        """With an output layer."""
        return replace(model, lm_head=True)

    def build(self, processor: Tokenizer, model: XLNetConfig, batching: BatchingConfig) -> "PermutationLM":
        """The task with a run's tokenizer, for a model of this config."""
        if model.max_length < 8:
            raise UserError(f"model.max_length={model.max_length} is too short a text; give at least 8")
        return PermutationLM(self, processor, batching, model.max_length)


@dataclass(frozen=True)
class PermutationLM(Task):
    """Documents one after the other, in rows whose tokens are predicted in a random order."""

    config: PermutationLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row, special ones included."""

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a document."""
        return {"text": token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id)}

    @property
    def num_predict(self) -> int:
        """Tokens of a full row that are predicted."""
        return max(1, round((self.max_length - FUNCTIONAL) * self.config.predict_fraction))

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """The ids of each document."""
        return [{"text": ids} for ids in self.tokenizer.encode([record["text"] for record in records])]

    def layout(self, examples: Store, *, training: bool) -> "_PermutedRows":
        """The documents as one stream, in rows whose tokens are in a random order."""
        return _PermutedRows(examples, self)

    def loss(self, model: XLNet, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of the predicted tokens."""

        def sums(logits, labels, weights):
            right = jnp.sum((jnp.argmax(logits, -1) == labels) * weights)
            return cross_entropy(logits, labels, weights)[0], right

        x, weight = self._hidden(model, batch, key), jnp.sum(batch["weights"])
        total, right = chunked_sums(sums, x, model.logits, batch["labels"], batch["weights"])
        return {"loss": LossTerm(total, weight), "token_accuracy": LossTerm(right, weight, 0.0)}

    def score(self, results: Results) -> Metrics:
        """Perplexity per predicted token."""
        return {"perplexity": perplexity(results.means["loss"])}

    def samples(self, records: Sequence[Document], predictor: Predictor) -> list[dict[str, str]]:
        """Texts, some of their tokens as the model predicts them, and as they are."""
        layout = self.layout(Store.of(self.encode(records), self.columns), training=False)
        found = predictor(PermutationLM._guess, layout, limit=len(records))
        rows = []
        for ids, guesses, labels, weights in zip(*(found[name] for name in _SHOWN), strict=True):
            words = [listed_tokens(self.tokenizer, tokens[weights > 0]) for tokens in (guesses, labels)]
            rows.append({"text": self.tokenizer.decode([ids])[0], "model": words[0], "reference": words[1]})
        return rows

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """What the tokens of a text attend to, all of which see each other."""
        (inner,) = self.tokenizer.encode([text])
        ids = [*inner, self.tokenizer.end_id, self.tokenizer.begin_id]
        room = {"max_length": max(len(ids), self.max_length), "batch_rows": 1}
        found = predictor.over(PermutationLM._attention, [{"text": ids}], self.columns, **room)
        tokens = self.tokenizer.tokens(ids)
        return "", [attention_map("content", found["weights"][0], tokens, tokens)]

    def _hidden(self, model: XLNet, batch: Mapping[str, Array], key: Array | None) -> Float[Array, "B P D"]:
        x, _ = model.hidden_and_memory(
            batch["ids"],
            batch["types"],
            target_positions=batch["positions"],
            allowed=batch["allowed"],
            valid=batch["ids"] != self.tokenizer.pad_id,
            dropout_key=key,
        )
        return x

    def _guess(self, model: XLNet, batch: Mapping[str, Array]) -> dict[str, Array]:
        guesses = jnp.argmax(model.logits(self._hidden(model, batch, None)), axis=-1)
        return {"guesses": guesses} | {name: batch[name] for name in _SHOWN if name != "guesses"}

    def _attention(self, model: XLNet, batch: Mapping[str, Array]) -> dict[str, Array]:
        # Distances are relative, so padding may be on either side.
        valid = batch["text_segments"] > 0
        is_last = jnp.arange(valid.shape[1])[None] == jnp.sum(valid, axis=1, keepdims=True) - 1
        weights = model.attention(batch["text"], jnp.where(is_last, SUMMARY_TYPE, 0), valid=valid)
        return {"weights": jnp.moveaxis(weights, 1, 0)}


_SHOWN = ("ids", "guesses", "labels", "weights")


class _PermutedRows:
    """A layout of documents one after the other: rows of text, end and summary, in a random order."""

    members = None

    def __init__(self, store: Store, task: PermutationLM):
        self._task = task
        batch_rows = task.batching.batch_rows(task.max_length)
        self._chunks = Chunks(store, length=task.max_length - FUNCTIONAL, batch_rows=batch_rows, overlap=0)
        self.buckets = self._chunks.buckets
        self.describe = self._chunks.describe

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones. XLNet has its padding on the left."""
        task, length = self._task, self._task.max_length
        texts = self._chunks.rows(bucket, indices, count, rng)
        batch = {
            "ids": np.full((count, length), task.tokenizer.pad_id, np.int32),
            "types": np.zeros((count, length), np.int32),
            "allowed": np.zeros((count, length, length), bool),
            "positions": np.zeros((count, task.num_predict), np.int32),
            "labels": np.zeros((count, task.num_predict), np.int32),
            "weights": np.zeros((count, task.num_predict), np.float32),
        }
        for row in range(len(indices)):
            random = rng(row)
            text = texts["text"][row][texts["text_segments"][row] > 0]
            ids = np.concatenate([text, [task.tokenizer.end_id, task.tokenizer.begin_id]])
            functional = np.arange(len(ids)) >= len(text)
            num_predict = min(task.num_predict, max(1, round(len(text) * task.config.predict_fraction)))
            chosen = sample_targets(functional, random, num_predict=num_predict, max_gram=task.config.max_gram)
            permuted = permutation_masks(chosen, functional, random)
            first = length - len(ids)
            batch["ids"][row, first:], batch["types"][row, -1] = ids, SUMMARY_TYPE
            batch["allowed"][row, first:, first:] = permuted.query
            found = len(permuted.positions)
            batch["positions"][row, :found] = first + permuted.positions
            batch["labels"][row, :found] = ids[permuted.positions]
            batch["weights"][row, :found] = 1
        return batch
