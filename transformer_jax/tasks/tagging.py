"""Tagging: a label for each word of a text, as for the entities in it (Tjong Kim Sang, De Meulder 2003)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from transformer_jax.data.columns import Column, Example
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.functional.dropout import split
from transformer_jax.models import Bert, BertConfig
from transformer_jax.tasks.abilities import check_texts
from transformer_jax.tasks.labels import described, label_index, labelled
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import span_scores
from transformer_jax.tasks.task import BestCheckpoint, Loss, Metrics, Results, TaskConfig
from transformer_jax.tasks.text_rows import TextRowTask

NO_TAG = -1
OTHER = "O"  # the tag of a word in no span


@dataclass(frozen=True)
class TaggingConfig(TaskConfig):
    """The tag of each word: for a Bert. Words and tags are lists, or strings with spaces between."""

    fields: ClassVar = ("text", "tags")
    word_fields: ClassVar = ("text",)
    models: ClassVar = (BertConfig,)
    decides: ClassVar = ("heads", "num_labels", "label_names")

    def adapt(self, model: BertConfig, records: Sequence[Mapping[str, Any]]) -> BertConfig:
        """With a tagger of the tags in the training set."""
        return replace(
            labelled(model, (tag for record in records for tag in _words(record["tags"]))), heads=("tagger",)
        )

    def build(self, processor: Tokenizer, model: BertConfig, batching: BatchingConfig) -> "Tagging":
        """The task with a run's tokenizer, for a model of this config."""
        return Tagging(self, processor, batching, model.max_length, label_names=model.label_names)


@dataclass(frozen=True)
class Tagging(TextRowTask):
    """A row for each text. The first token of a word has its tag, the others none."""

    label_names: tuple[str, ...] = ()

    best: ClassVar = BestCheckpoint("f1", "highest")

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a row, their types, and at the first token of each word its index and its tag."""
        tags = Column(padding=NO_TAG, limits=(NO_TAG, len(self.label_names) - 1))
        return self.row_columns | {"words": Column(padding=NO_TAG), "tags": tags}

    def describe(self) -> str:
        """How many tags there are, and some of them."""
        return described(self.label_names)

    def encode(self, records: Sequence[Mapping[str, Any]]) -> list[Example]:
        """[CLS] text [SEP], with the tag of a word at its first token."""
        examples: list[Example] = []
        words = [_words(record["text"]) for record in records]
        for record, texts, encoded in zip(records, words, self.tokenizer.encode_words(words), strict=True):
            word_of = np.array(encoded.words[: self.room()], int)
            first = np.where(np.diff(word_of, prepend=NO_TAG) > 0, word_of, NO_TAG)
            example: dict[str, Any] = {**self.row(encoded.ids), "words": [NO_TAG, *first, NO_TAG]}
            if "tags" in record:
                tags = _words(record["tags"])
                if len(tags) != len(texts):
                    raise UserError(f"the text {' '.join(texts)[:20]!r} has {len(texts)} words but {len(tags)} tags")
                numbers = np.array([*(label_index(tag, self.label_names) for tag in tags), NO_TAG])
                example["tags"] = numbers[example["words"]]  # where no word begins, the last
            examples.append(example)
        return examples

    def loss(self, model: Bert, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of the tags."""
        encoder_key, head_key = split(key, 2)
        logits = model.tag(self.hidden(model, batch, encoder_key), dropout_key=head_key)
        return cross_entropy(logits, batch["tags"], batch["tags"] != NO_TAG)

    def predict(self, model: Bert, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The most likely tag of each token, and the word that begins with it, if one does."""
        return {"tags": jnp.argmax(model.tag(self.hidden(model, batch)), axis=-1), "words": batch["words"]}

    def score(self, results: Results) -> Metrics:
        """Precision, recall and F1 of the spans, and accuracy of the tags."""
        expected = [_words(record["tags"]) for record in results.records]
        return span_scores(self._names(results.predictions, list(map(len, expected))), expected)

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each text cannot be tagged, if it cannot."""
        return [None if text.strip() else "is empty" for text in texts]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """The tags of the words of each text, with spaces between."""
        check_texts(self, texts)
        found = predictor.over(Tagging.predict, self.encode([self.record(text) for text in texts]))
        return [" ".join(tags) for tags in self._names(found, [len(text.split()) for text in texts])]

    def record(self, text: str) -> dict[str, str]:
        """Words with spaces between."""
        return {"text": text}

    def samples(self, records: Sequence[Mapping[str, Any]], predictor: Predictor) -> list[dict[str, str]]:
        """Texts, the tags that the model gives them, and their own."""
        texts, references = ([_words(record[field]) for record in records] for field in ("text", "tags"))
        found = self._names(predictor.over(Tagging.predict, self.encode(records)), list(map(len, texts)))
        rows = zip(texts, found, references, strict=True)
        return [dict(zip(("text", "model", "reference"), map(" ".join, row), strict=True)) for row in rows]

    def _names(self, predictions: Mapping[str, Sequence[np.ndarray]], lengths: Sequence[int]) -> list[list[str]]:
        """The tag of each word by its name; "O" for words that were cut off, or that the tokenizer removes."""
        named = []
        for tags, words, length in zip(predictions["tags"], predictions["words"], lengths, strict=True):
            names = [OTHER] * length
            for tag, word in zip(tags[words != NO_TAG], words[words != NO_TAG], strict=True):
                names[word] = self.label_names[tag]
            named.append(names)
        return named


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, Sequence | np.ndarray):
        raise UserError(f"{value!r} is not a list of words, nor a string of them")
    return [str(word) for word in value]
