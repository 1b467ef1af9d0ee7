"""Span corruption: write the spans that were left out of a text, as T5 is trained (Raffel et al. 2020, 3.1.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from transformer_jax.data.batches import Batch, Bucket, Chance
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import T5, AttentionWeights, T5Config
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.inference import bucket_width, first_batches, padded, text_batches, without_padding
from transformer_jax.tasks.span_corruption import corrupt_spans, lengths_for, noise_mask
from transformer_jax.tasks.task import (
    Figures,
    Sums,
    Tick,
    Watched,
    loss_and_perplexity,
    require_head,
    sum_over,
)

MARK = "<extra_id_{}>"  # what T5 calls its sentinels


@dataclass(frozen=True)
class DenoisingConfig:
    """The spans that were left out of a text: for a T5."""

    density: float = 0.15
    """Share of the tokens that are left out,"""
    mean_span: float = 3.0
    """so many at a time on average."""
    num_sentinels: int = 100
    """Ids that stand for what was left out, beside those of the tokenizer; a tokenizer of T5 has its own."""

    fields: ClassVar = ("text",)
    models: ClassVar = (T5Config,)

    def __post_init__(self):
        if not 0 < self.density < 1 or self.mean_span < 1 or self.num_sentinels < 1:
            raise UserError(
                f"density={self.density} must be between 0 and 1, mean_span={self.mean_span} at least 1, "
                f"num_sentinels={self.num_sentinels} at least 1"
            )

    def num_extra_ids(self, tokenizer: Tokenizer) -> int:
        """Ids that the model needs beside those of the tokenizer: the sentinels, if it has none."""
        return 0 if tokenizer.find(MARK.format(0)) is not None else self.num_sentinels

    def build(self, tokenizer: Tokenizer, model: T5Config, batching: BatchingConfig) -> "Denoising":
        """The task with this tokenizer, for a model of this config."""
        require_head(model.lm_head)
        task = Denoising(self, tokenizer, batching, model.max_length)
        needed = len(task.sentinels)
        spans = task.lengths[1] - 1 - round(task.num_tokens * self.density)
        if spans > needed:
            raise UserError(f"a text of {model.max_length} tokens has {spans} spans, but there are {needed} sentinels")
        return task


@dataclass(frozen=True)
class Denoising:
    """How documents become batches, what the loss is, and how well a model does."""

    config: DenoisingConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a source, sentinels and end included."""

    @property
    def sentinels(self) -> tuple[int, ...]:
        """The ids that stand for spans, in order: they count down, as those of T5 do."""
        if self.config.num_extra_ids(self.tokenizer):
            first = self.tokenizer.vocab_size
            return tuple(range(first + self.config.num_sentinels - 1, first - 1, -1))
        found = (self.tokenizer.find(MARK.format(number)) for number in range(self.config.num_sentinels))
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
        """Documents: `{"text": ids}`."""
        return [{"text": ids} for ids in self.tokenizer.encode([record["text"] for record in records])]

    def layout(self, examples: Store) -> "_CorruptedRows":
        """The documents one after the other, in rows from which chance leaves out spans."""
        return _CorruptedRows(examples, self)

    def loss(self, model: T5, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Sums:
        """Cross-entropy of each target token given those before it, as a sum and the number of tokens."""
        sums, balance = self._sums(model, batch, key)
        return sums["loss"] + balance, sums["tokens"]

    def sums(self, model: T5, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The loss, and how many target tokens there are and are right."""
        return self._sums(model, batch, None)[0]

    def evaluate(
        self, model: T5, records: Sequence[Document], strategy: Strategy, *, tick: Tick = lambda done: None
    ) -> Figures:
        """Loss, perplexity and accuracy per target token, and the loss per token of text: sentinels are easy."""
        layout = self.layout(Store.of(self.encode(list(records))))
        sums = sum_over(self, model, layout, strategy, num_records=len(records), tick=tick)
        return loss_and_perplexity(sums) | {
            "token_match": sums["right"] / max(sums["tokens"], 1),
            "text_loss": sums["text_loss"] / max(sums["text_tokens"], 1),
        }

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps the gaps of each text from being filled, if anything does."""
        return [self._fault(ids) for ids in self._sources(texts)]

    def complete(self, model: T5, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """What the model writes for the gaps <extra_id_0>, <extra_id_1>, ... of each text."""
        return [self._shown(ids) for ids in self._fill(model, texts, strategy)]

    def _fill(self, model: T5, texts: Sequence[str], strategy: Strategy) -> list[np.ndarray]:
        sources = self._sources(texts)
        self.tokenizer.warn_if_unknown([ids[:-1] for ids in sources], "texts")
        for text, ids in zip(texts, sources, strict=True):
            if fault := self._fault(ids):
                raise UserError(f"the text {text[:20]!r} {fault}")
        written = [np.zeros(0, np.int32)] * len(texts)
        room = {"max_length": self.max_length, "pad_id": self.tokenizer.pad_id}
        for members, batch in text_batches(sources, self.batching, strategy, **room):
            outputs = self._written(model, strategy.place(batch)["ids"])
            for member, output in zip(members, outputs, strict=False):
                written[member] = output
        return written

    def samples(self, model: T5, records: Sequence[Document], strategy: Strategy) -> list[dict[str, str]]:
        """Texts with gaps, what the model writes for these, and what was there."""
        rows = []
        for count, batch in first_batches(self.layout(Store.of(self.encode(records))), len(records), strategy):
            written = self._written(model, strategy.place(batch)["source"])
            for row in range(count):
                names = {"text": batch["source"][row], "model": written[row], "reference": batch["target"][row]}
                rows.append({name: self._shown(ids) for name, ids in names.items()})
        return rows

    def attention(self, model: T5, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """What fills the gaps of a text, and what the model attends to while it writes it."""
        (written,) = self._fill(model, [text], strategy)
        (source,) = self._sources([text])
        target = [self.tokenizer.pad_id, *written.tolist(), self.tokenizer.end_id]
        rows = (
            padded(ids, bucket_width(limit, self.batching), max_length=limit, pad_id=self.tokenizer.pad_id)
            for ids, limit in ((source, self.max_length), (target[:-1], 2 * self.lengths[1]))
        )
        weights = _attention(model, *rows)
        read, write = ([self._shown([id]) or self.tokenizer.tokens([id])[0] for id in ids] for ids in (source, target))
        return self._shown(written), [
            without_padding("cross, by the token being written", weights.cross, write[1:], read),
            without_padding("encoder", weights.encoder, read, read),
            without_padding("decoder", weights.decoder, write[:-1], write[:-1]),
        ]

    def _written(self, model: T5, source: Int[Array, "B S"]) -> list[np.ndarray]:
        tokens, lengths = map(np.asarray, _search(model, source, task=self))
        return [row[:length] for row, length in zip(tokens, lengths, strict=True)]

    def _sums(self, model: T5, batch: Mapping[str, Array], key: Array | None) -> tuple[dict[str, Array], Array]:
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        weights = labels != self.tokenizer.pad_id
        logits, balance = model.logits_and_balance(batch["source"], inputs, dropout_key=key)
        total, weight = cross_entropy(logits, labels, weights)
        right = jnp.sum((jnp.argmax(logits, -1) == labels) & weights)
        is_text = weights & ~jnp.isin(labels, jnp.array([*self.sentinels, self.tokenizer.end_id]))
        text_total, text_weight = cross_entropy(logits, labels, is_text)
        sums = {"loss": total, "tokens": weight, "right": right, "text_loss": text_total, "text_tokens": text_weight}
        return sums, balance

    def _sources(self, texts: Sequence[str]) -> list[list[int]]:
        sources = []
        for text in texts:
            pieces, ids = [text], []
            for number, sentinel in enumerate(self.sentinels):
                before, mark, after = pieces.pop().partition(MARK.format(number))
                ids += [*self.tokenizer.encode([before])[0], *([sentinel] if mark else [])]
                if not mark:
                    break
                pieces.append(after)
            else:
                ids += self.tokenizer.encode(pieces)[0]
            sources.append([*ids, self.tokenizer.end_id])
        return sources

    def _fault(self, ids: Sequence[int]) -> str | None:
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
                texts.append("" if id is None else MARK.format(numbers[id]))
            else:
                piece.append(id)
        return "".join(texts)


class _CorruptedRows:
    """A layout of documents one after the other: rows of text, of which chance leaves out spans."""

    def __init__(self, store: Store, task: Denoising):
        self._task = task
        batch_rows = task.batching.batch_rows(task.max_length)
        self._chunks = Chunks(
            store, length=task.num_tokens, batch_rows=batch_rows, pad_id=task.tokenizer.pad_id, overlap=0
        )
        self.buckets: list[Bucket] = self._chunks.buckets
        self.describe = self._chunks.describe

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""
        task, (source_length, target_length) = self._task, self._task.lengths
        texts = self._chunks.rows(bucket, numbers, count, chance)
        source = np.full((count, source_length), task.tokenizer.pad_id, np.int32)
        target = np.full((count, target_length + 1), task.tokenizer.pad_id, np.int32)  # it begins with padding
        for place in range(len(numbers)):
            ids = texts["text"][place][texts["text_segments"][place] > 0]
            mask = noise_mask(len(ids), chance(place), density=task.config.density, mean_span=task.config.mean_span)
            inputs, outputs = corrupt_spans(ids, mask, sentinels=task.sentinels, end_id=task.tokenizer.end_id)
            source[place, : len(inputs)], target[place, 1 : len(outputs) + 1] = inputs, outputs
        return {"source": source, "target": target}


@partial(jax.jit, static_argnames="task")
def _search(model: T5, source: Int[Array, "B S"], task: Denoising) -> tuple[Int[Array, "B length"], Int[Array, "B"]]:
    length = 2 * task.lengths[1]
    prompt = jnp.full((source.shape[0], 1), task.tokenizer.pad_id)
    state = model.start(source, length)
    found = greedy(model.decode, state, prompt, length=length, end_id=task.tokenizer.end_id)
    return found.tokens, found.lengths


@jax.jit
def _attention(model: T5, source: Int[Array, "1 S"], target: Int[Array, "1 T"]) -> AttentionWeights:
    return model.attention(source, target)
