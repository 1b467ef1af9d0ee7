"""Span corruption: write the spans that were left out of a text, as T5 is trained (Raffel et al. 2020, 3.1.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from transformer_jax.data.batches import Batch, RowRng
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import chunked_sums, cross_entropy
from transformer_jax.models import T5, T5Config
from transformer_jax.tasks.abilities import AttentionMap, attention_map, check_texts
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import perplexity
from transformer_jax.tasks.span_corruption import corrupt_spans, lengths_for, noise_mask
from transformer_jax.tasks.task import Loss, LossTerm, Metrics, Results, Task, TaskConfig

SENTINEL = "<extra_id_{}>"  # what T5 calls them


@dataclass(frozen=True)
class DenoisingConfig(TaskConfig):
    """The spans that were left out of a text: for a T5."""

    density: float = 0.15
    """Fraction of the tokens that are left out."""
    mean_span: float = 3.0
    """Average length of a span that is left out, in tokens."""
    num_sentinels: int = 100
    """Number of ids that stand for spans, beside those of the tokenizer; a tokenizer of T5 has its own."""

    fields: ClassVar = ("text",)
    text_fields: ClassVar = ("text",)
    models: ClassVar = (T5Config,)

    def __post_init__(self):
        if not 0 < self.density < 1 or self.mean_span < 1 or self.num_sentinels < 1:
            raise UserError(
                f"density={self.density} must be between 0 and 1, mean_span={self.mean_span} at least 1, "
                f"num_sentinels={self.num_sentinels} at least 1"
            )

    def num_extra_ids(self, processor: Tokenizer) -> int:
        """Number of ids that the model needs beside those of the tokenizer: the sentinels, if it has none."""
        return 0 if processor.find(SENTINEL.format(0)) is not None else self.num_sentinels

    def adapt(self, model: T5Config, records: Sequence[Document]) -> T5Config:
        """With an output layer."""
        return replace(model, lm_head=True)

    def build(self, processor: Tokenizer, model: T5Config, batching: BatchingConfig) -> "Denoising":
        """The task with a run's tokenizer, for a model of this config."""
        task = Denoising(self, processor, batching, model.max_length)
        needed = len(task.sentinels)
        spans = task.lengths[1] - 1 - round(task.num_tokens * self.density)
        if spans > needed:
            raise UserError(f"a text of {model.max_length} tokens has {spans} spans, but there are {needed} sentinels")
        return task


@dataclass(frozen=True)
class Denoising(Task):
    """Documents one after the other, in rows from which random spans are left out."""

    config: DenoisingConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a source, sentinels and end included."""

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a document."""
        return {"text": token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id)}

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids that stand for spans, in order: they count down, as those of T5 do."""
        if self.config.num_extra_ids(self.tokenizer):
            first = self.tokenizer.vocab_size
            return tuple(range(first + self.config.num_sentinels - 1, first - 1, -1))
        found = (self.tokenizer.find(SENTINEL.format(number)) for number in range(self.config.num_sentinels))
        return tuple(id for id in found if id is not None)

    @property
    def num_tokens(self) -> int:
        """How many tokens of text become one row."""
        return lengths_for(self.max_length, density=self.config.density, mean_span=self.config.mean_span)[0]

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of sources and of targets."""
        config = self.config
        return self.max_length, lengths_for(self.max_length, density=config.density, mean_span=config.mean_span)[1]

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """The ids of each document."""
        return [{"text": ids} for ids in self.tokenizer.encode([record["text"] for record in records])]

    def layout(self, examples: Store, *, training: bool) -> "_CorruptedRows":
        """The documents as one stream, in rows from which random spans are left out."""
        return _CorruptedRows(examples, self)

    def loss(self, model: T5, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of each target token given those before it; that of text is told apart: sentinels are easy."""
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        weights = labels != self.tokenizer.pad_id
        is_text = weights & ~jnp.isin(labels, jnp.array([*self.sentinels, self.tokenizer.end_id]))
        x, auxiliary_loss = model.hidden_and_balance(batch["source"], inputs, dropout_key=key)

        def sums(logits, labels, weights, is_text):
            right = jnp.sum((jnp.argmax(logits, -1) == labels) & weights)
            return cross_entropy(logits, labels, weights)[0], right, cross_entropy(logits, labels, is_text)[0]

        total, right, text_total = chunked_sums(sums, x, model.logits, labels, weights, is_text)
        weight, text_weight = jnp.sum(weights, dtype=jnp.float32), jnp.sum(is_text, dtype=jnp.float32)
        return {
            "loss": LossTerm(total if key is None else total + auxiliary_loss, weight),
            "token_accuracy": LossTerm(right, weight, 0.0),
            "text_loss": LossTerm(text_total, text_weight, 0.0),
        }

    def score(self, results: Results) -> Metrics:
        """Perplexity per target token."""
        return {"perplexity": perplexity(results.means["loss"])}

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why the gaps of each text cannot be filled, if they cannot."""
        return [self._problem(ids) for ids in self._sources(texts)]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """What the model writes for the gaps <extra_id_0>, <extra_id_1>, ... of each text."""
        return [self._shown(ids) for ids in self._fill(texts, predictor)]

    def samples(self, records: Sequence[Document], predictor: Predictor) -> list[dict[str, str]]:
        """Texts with gaps, what the model writes for these, and what was there."""
        layout = self.layout(Store.of(self.encode(records), self.columns), training=False)
        found = predictor(Denoising._search, layout, limit=len(records))
        rows = zip(found["source"], found["tokens"], found["lengths"], found["target"], strict=True)
        return [
            {"text": self._shown(source), "model": self._shown(tokens[:length]), "reference": self._shown(target)}
            for source, tokens, length, target in rows
        ]

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """What fills the gaps of a text, and what the model attends to while it writes it."""
        (written,) = self._fill([text], predictor)
        (source,) = self._sources([text])
        target = [self.tokenizer.pad_id, *written, self.tokenizer.end_id]
        columns = {"source": self._ids, "target": self._ids}
        room = {"max_length": max(self.max_length, 2 * self.lengths[1] + 1), "batch_rows": 1}
        found = predictor.over(Denoising._attention, [{"source": source, "target": target}], columns, **room)
        read, write = ([self._shown([id]) or self.tokenizer.tokens([id])[0] for id in ids] for ids in (source, target))
        return self._shown(written), [
            attention_map("cross, by the token being written", found["cross"][0], write[1:], read),
            attention_map("encoder", found["encoder"][0], read, read),
            attention_map("decoder", found["decoder"][0], write[:-1], write[:-1]),
        ]

    @property
    def _ids(self) -> Column:
        num_ids = self.tokenizer.vocab_size + self.config.num_extra_ids(self.tokenizer)
        return token_column(num_ids, self.tokenizer.pad_id)

    def _fill(self, texts: Sequence[str], predictor: Predictor) -> list[list[int]]:
        check_texts(self, texts)
        sources = self._sources(texts)
        self.tokenizer.warn_if_unknown([ids[:-1] for ids in sources], "texts")
        examples = [{"source": ids} for ids in sources]
        found = predictor.over(Denoising._search, examples, {"source": self._ids}, max_length=self.max_length)
        rows = zip(found["tokens"], found["lengths"], strict=True)
        return [tokens[:length].tolist() for tokens, length in rows]

    def _search(self, model: T5, batch: Mapping[str, Array]) -> dict[str, Array]:
        """What is written for each source, by greedy decoding; and the batch, where it is to be shown beside it."""
        source, length = batch["source"], 2 * self.lengths[1]
        prompt = jnp.full((source.shape[0], 1), self.tokenizer.pad_id)
        state = model.start(source, length)
        found = greedy(model.decode, state, prompt, length=length, end_id=self.tokenizer.end_id)
        return {"tokens": found.tokens, "lengths": found.lengths, **batch}

    def _attention(self, model: T5, batch: Mapping[str, Array]) -> dict[str, Array]:
        weights = model.attention(batch["source"], batch["target"][:, :-1])
        return {name: jnp.moveaxis(array, 1, 0) for name, array in weights._asdict().items()}

    def _sources(self, texts: Sequence[str]) -> list[list[int]]:
        sources = []
        for text in texts:
            pieces, ids = [text], []
            for number, sentinel in enumerate(self.sentinels):
                before, mark, after = pieces.pop().partition(SENTINEL.format(number))
                ids += [*self.tokenizer.encode([before])[0], *([sentinel] if mark else [])]
                if not mark:
                    break
                pieces.append(after)
            else:
                ids += self.tokenizer.encode(pieces)[0]
            sources.append([*ids, self.tokenizer.end_id])
        return sources

    def _problem(self, ids: Sequence[int]) -> str | None:
        if self.sentinels[0] not in ids:
            return "has no gap <extra_id_0> to be filled"
        if len(ids) > self.max_length:
            return f"has {len(ids)} tokens; the model reads at most {self.max_length}"
        return None

    def _shown(self, ids: Sequence[int] | np.ndarray) -> str:
        numbers = {id: number for number, id in enumerate(self.sentinels)}
        texts: list[str] = []
        piece: list[int] = []
        for id in [*map(int, ids), None]:
            if id is None or id in numbers:
                texts.append(self.tokenizer.decode([piece])[0])
                piece = []
                texts.append("" if id is None else SENTINEL.format(numbers[id]))
            else:
                piece.append(id)
        return "".join(texts)


class _CorruptedRows:
    """A layout of documents one after the other: rows of text, from which random spans are left out."""

    members = None

    def __init__(self, store: Store, task: Denoising):
        self._task = task
        batch_rows = task.batching.batch_rows(task.max_length)
        self._chunks = Chunks(store, length=task.num_tokens, batch_rows=batch_rows, overlap=0)
        self.buckets = self._chunks.buckets
        self.describe = self._chunks.describe

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones."""
        task, (source_length, target_length) = self._task, self._task.lengths
        texts = self._chunks.rows(bucket, indices, count, rng)
        source = np.full((count, source_length), task.tokenizer.pad_id, np.int32)
        target = np.full((count, target_length + 1), task.tokenizer.pad_id, np.int32)  # it begins with padding
        for row in range(len(indices)):
            ids = texts["text"][row][texts["text_segments"][row] > 0]
            mask = noise_mask(len(ids), rng(row), density=task.config.density, mean_span=task.config.mean_span)
            inputs, outputs = corrupt_spans(ids, mask, sentinels=task.sentinels, end_id=task.tokenizer.end_id)
            source[row, : len(inputs)], target[row, 1 : len(outputs) + 1] = inputs, outputs
        return {"source": source, "target": target}
