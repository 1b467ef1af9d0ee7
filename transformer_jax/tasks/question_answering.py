"""Extractive question answering: the span of a passage that answers a question (Rajpurkar et al. 2016)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Key

from transformer_jax.data.columns import Column, Example
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.functional.dropout import split
from transformer_jax.models import Bert, BertConfig
from transformer_jax.tasks.abilities import check_texts
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import answer_scores
from transformer_jax.tasks.task import BestCheckpoint, Loss, LossTerm, Metrics, Results, TaskConfig
from transformer_jax.tasks.text_rows import TextRowTask

OUTSIDE = -1  # of an answer that is not in the part of the passage that the model reads


@dataclass(frozen=True)
class QuestionAnsweringConfig(TaskConfig):
    """The answer to a question, as it stands in a passage: for a Bert. Of a long passage the beginning is read."""

    max_answer_length: int = 30
    """Most tokens of an answer."""

    fields: ClassVar = ("question", "passage", "answer")
    text_fields: ClassVar = ("question", "passage", "answer")
    models: ClassVar = (BertConfig,)
    decides: ClassVar = ("heads",)

    def __post_init__(self):
        if self.max_answer_length < 1:
            raise UserError(f"max_answer_length must be at least 1; got {self.max_answer_length}")

    def adapt(self, model: BertConfig, records: Sequence[Any]) -> BertConfig:
        """With a head for the first and the last token of an answer."""
        return replace(model, heads=("span",))

    def build(self, processor: Tokenizer, model: BertConfig, batching: BatchingConfig) -> "QuestionAnswering":
        """The task with a run's tokenizer, for a model of this config."""
        return QuestionAnswering(self, processor, batching, model.max_length)


@dataclass(frozen=True)
class QuestionAnswering(TextRowTask):
    """A row for each question and its passage."""

    unit: ClassVar = "examples"
    best: ClassVar = BestCheckpoint("f1", "highest")

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a row, their types, the characters of each token of the passage, and where the answer is."""
        characters = Column(shape=(2,), padding=OUTSIDE)
        position = Column(ragged=False, padding=OUTSIDE, limits=(OUTSIDE, self.max_length - 1))
        return self.row_columns | {"characters": characters, "first": position, "last": position}

    def encode(self, records: Sequence[Mapping[str, Any]]) -> list[Example]:
        """[CLS] question [SEP] passage [SEP], and the tokens of the answer's first occurrence in the passage."""
        questions = self.tokenizer.encode([record["question"] for record in records])
        passages = self.tokenizer.encode_with_offsets([record["passage"] for record in records])
        return [self._example(*parts) for parts in zip(records, questions, passages, strict=True)]

    def loss(self, model: Bert, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of the first and of the last token; an answer that cannot be seen has weight 0."""
        first, last = self._logits(model, batch, key)
        is_inside = batch["first"] != OUTSIDE
        return {
            "first_loss": LossTerm(*cross_entropy(first, batch["first"], is_inside), 0.5),
            "last_loss": LossTerm(*cross_entropy(last, batch["last"], is_inside), 0.5),
        }

    def predict(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The characters of the most likely answer: the last token is not before the first, nor far behind it."""
        first, last = self._logits(model, batch, None)
        position = jnp.arange(first.shape[1])
        distance = position[None] - position[:, None]
        allowed = (distance >= 0) & (distance < self.config.max_answer_length)
        scores = jnp.where(allowed[None], first[:, :, None] + last[:, None, :], -jnp.inf)
        best = jnp.argmax(scores.reshape(len(scores), -1), axis=-1)
        begin, end = best // first.shape[1], best % first.shape[1]
        rows = jnp.arange(len(best))
        characters = batch["characters"]
        return {"start": characters[rows, begin, 0], "stop": characters[rows, end, 1]}

    def score(self, results: Results) -> Metrics:
        """Exact match and F1, as SQuAD's own script has them."""
        return answer_scores(
            self._answers(results.records, results.predictions), [r["answer"] for r in results.records]
        )

    def samples(self, records: Sequence[Mapping[str, Any]], predictor: Predictor) -> list[dict[str, str]]:
        """Questions and passages, the answers that the model finds, and their own."""
        answers = self._answers(records, predictor.over(QuestionAnswering.predict, self.encode(records)))
        return [
            {"text": f"{record['question']}\t{record['passage']}", "model": answer, "reference": record["answer"]}
            for record, answer in zip(records, answers, strict=True)
        ]

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each line cannot be answered, if it cannot."""
        return [None if text.count("\t") == 1 else "needs a question, a tab and a passage" for text in texts]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """The answer to each question; it and its passage have a tab between them."""
        check_texts(self, texts)
        records = [self.record(text) for text in texts]
        return self._answers(records, predictor.over(QuestionAnswering.predict, self.encode(records)))

    def record(self, text: str) -> dict[str, str]:
        """A question and its passage, with a tab between them."""
        return dict(zip(("question", "passage"), text.split("\t", 1), strict=True))

    def _example(self, record: Mapping[str, Any], question: list[int], passage: Any) -> Example:
        room = self.max_length - 3 - len(question)
        if room < 1:
            raise UserError(
                f"the question {record['question'][:20]!r} has {len(question)} tokens, which leaves no room for a "
                f"passage in the {self.max_length} that the model reads"
            )
        start = len(question) + 2
        offsets = [tuple(offset) for offset in passage.offsets[:room]]
        row: dict[str, Any] = self.row(question, passage.ids[:room])
        row["characters"] = [(OUTSIDE, OUTSIDE)] * start + offsets + [(OUTSIDE, OUTSIDE)]
        if "answer" not in record:
            return row
        begin = record["passage"].find(record["answer"])
        if begin < 0:
            raise UserError(f"the answer {record['answer'][:20]!r} does not stand in its passage")
        end = begin + len(record["answer"])
        inside = [i for i, (first, last) in enumerate(offsets) if first < end and begin < last]
        is_whole = bool(inside) and offsets[inside[-1]][1] >= end
        return row | {
            "first": start + inside[0] if is_whole else OUTSIDE,
            "last": start + inside[-1] if is_whole else OUTSIDE,
        }

    def _logits(self, model: Bert, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> tuple[Array, Array]:
        """The logits of the first and the last token of the answer, which is in the passage."""
        encoder_key, head_key = split(key, 2)
        logits = model.span(self.hidden(model, batch, encoder_key), dropout_key=head_key)
        in_passage = (batch["characters"][:, :, 0] != OUTSIDE)[:, :, None]
        logits = jnp.where(in_passage, logits, -1e9)
        return logits[:, :, 0], logits[:, :, 1]

    def _answers(self, records: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Any]]) -> list[str]:
        spans = zip(records, found["start"], found["stop"], strict=True)
        return [record["passage"][int(start) : int(stop)] for record, start, stop in spans]
