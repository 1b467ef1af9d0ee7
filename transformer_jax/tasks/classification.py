"""Text classification: one of several labels for a text, or for a pair of texts."""

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
from transformer_jax.models import GPT, Bert, BertConfig, GPTConfig
from transformer_jax.tasks.abilities import check_texts
from transformer_jax.tasks.labels import described, label_index, labelled
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import accuracy, macro_f1
from transformer_jax.tasks.task import BestCheckpoint, Loss, Metrics, Results, TaskConfig
from transformer_jax.tasks.text_rows import TextRowTask

Config = BertConfig | GPTConfig


@dataclass(frozen=True)
class ClassificationConfig(TaskConfig):
    """The label of a text, or of a pair of texts: for a Bert or a GPT."""

    pairs: bool = False
    """Whether a record has a second text, in the field pair."""

    models: ClassVar = (BertConfig, GPTConfig)
    decides: ClassVar = ("heads", "num_labels", "label_names", "lm_head")

    @property
    def text_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """The one text, or both."""
        return ("text", "pair") if self.pairs else ("text",)

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """The texts and their label."""
        return (*self.text_fields, "label")

    def adapt(self, model: Config, records: Sequence[Mapping[str, Any]]) -> Config:
        """With a classifier of the labels in the training set."""
        model = labelled(model, map(_label, records))
        if isinstance(model, GPTConfig):
            return replace(model, heads=("classifier",), lm_head=False)
        return replace(model, heads=("pooler", "classifier"))

    def build(self, processor: Tokenizer, model: Config, batching: BatchingConfig) -> "Classification":
        """The task with a run's tokenizer, for a model of this config."""
        is_causal = isinstance(model, GPTConfig)
        return Classification(self, processor, batching, model.max_length, is_causal, model.label_names)


@dataclass(frozen=True)
class Classification(TextRowTask):
    """A row for each text or pair."""

    label_names: tuple[str, ...] = ()

    unit: ClassVar = "examples"
    best: ClassVar = BestCheckpoint("accuracy", "highest")

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a row, their types, and the label."""
        label = Column(ragged=False, limits=(0, len(self.label_names) - 1))
        return self.row_columns | {"label": label}

    def describe(self) -> str:
        """How many labels there are, and some of them."""
        return described(self.label_names)

    def encode(self, records: Sequence[Mapping[str, Any]]) -> list[Example]:
        """[CLS] text [SEP], and pair [SEP] behind it where there is a second text; for a GPT, the texts alone."""
        texts = [self.tokenizer.encode([record[field] for record in records]) for field in self.config.text_fields]
        rows = [self.row(*ids) for ids in zip(*texts, strict=True)]
        if not any("label" in record for record in records):
            return [*rows]
        labels = [label_index(_label(record), self.label_names) for record in records]
        return [{**row, "label": label} for row, label in zip(rows, labels, strict=True)]

    def loss(self, model: Bert | GPT, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of the labels."""
        return cross_entropy(self._logits(model, batch, key), batch["label"], batch["ids_segments"][:, 0] > 0)

    def predict(self, model: Bert | GPT, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The most likely label of each row."""
        return {"label": jnp.argmax(self._logits(model, batch, None), axis=-1)}

    def score(self, results: Results) -> Metrics:
        """Accuracy, and the mean of the F1 of each label."""
        predicted, expected = results.predictions["label"], results.examples.values["label"]
        return {"accuracy": accuracy(predicted, expected), "macro_f1": macro_f1(predicted, expected)}

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each text, or pair with a tab between, cannot be classified, if it cannot."""
        wanted = len(self.config.text_fields)
        return [_problem(text, wanted) for text in texts]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """The label of each text, or of each pair with a tab between the two."""
        check_texts(self, texts)
        return self._labels([self.record(text) for text in texts], predictor)

    def record(self, text: str) -> dict[str, str]:
        """A text, or two with a tab between them."""
        pieces = text.split("\t") if self.config.pairs else [text]
        return dict(zip(self.config.text_fields, pieces, strict=True))

    def samples(self, records: Sequence[Mapping[str, Any]], predictor: Predictor) -> list[dict[str, str]]:
        """Texts, the labels that the model gives them, and their own."""
        texts = ["\t".join(record[field] for field in self.config.text_fields) for record in records]
        return [
            {"text": text, "model": label, "reference": _label(record)}
            for text, record, label in zip(texts, records, self._labels(records, predictor), strict=True)
        ]

    def _labels(self, records: Sequence[Mapping[str, Any]], predictor: Predictor) -> list[str]:
        found = predictor.over(Classification.predict, self.encode(records))
        return [self.label_names[int(label)] for label in found["label"]]

    def _logits(self, model: Bert | GPT, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Array:
        model_key, head_key = split(key, 2)
        hidden = self.hidden(model, batch, model_key)
        if isinstance(model, GPT):
            return model.classify(hidden, batch["ids_segments"] > 0, dropout_key=head_key)
        return model.classify(hidden, dropout_key=head_key)


def _label(record: Mapping[str, Any]) -> str:
    if record.get("label") is None:
        raise UserError(f"the record {str(record)[:60]} has no label; give it one, or leave it out")
    return str(record["label"])


def _problem(text: str, num_texts: int) -> str | None:
    if not text.strip():
        return "is empty"
    found = text.count("\t") + 1
    if num_texts > 1 and found != num_texts:
        return f"has {found} texts; give {num_texts}, with a tab between them"
    return None
