"""Translation: a source text to a target text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from transformer_jax.data.batches import Batches
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.source import Record
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import beam_search, greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import T5, AttentionWeights, T5Config, Transformer, TransformerConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.scores import BleuTokenizer, translation_scores
from transformer_jax.tasks.task import Figures, Sums, Tick, Watched, require_head

Model = Transformer | T5


@dataclass(frozen=True)
class TranslationConfig:
    """A target text for each source text: for a Transformer or a T5."""

    label_smoothing: float = 0.1
    """Share of the target distribution that is spread over all tokens (Vaswani et al. 2017, 5.4)."""
    num_beams: int = 4
    """Hypotheses kept at each step of the search for a translation; 1 is greedy."""
    alpha: float = 0.6
    """Exponent of the length penalty ((5 + n) / 6)^alpha."""
    extra_length: int = 50
    """A translation has at most this many tokens more than its source."""
    bleu_tokenizer: BleuTokenizer = "13a"
    """How sacreBLEU finds the words of a text: 13a for most languages, zh for Chinese, char for Japanese and others."""

    fields: ClassVar = ("source", "target")
    models: ClassVar = (TransformerConfig, T5Config)

    def __post_init__(self):
        if self.num_beams < 1:
            raise UserError(f"num_beams must be at least 1; got {self.num_beams}")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1; got {self.label_smoothing}")

    def num_extra_ids(self, tokenizer: Tokenizer) -> int:
        """Ids that the model needs beside those of the tokenizer."""
        return 0

    def build(
        self, tokenizer: Tokenizer, model: TransformerConfig | T5Config, batching: BatchingConfig
    ) -> "Translation":
        """The task with this tokenizer, for a model of this config."""
        if isinstance(model, T5Config):
            require_head(model.lm_head)
        start_id = tokenizer.pad_id if isinstance(model, T5Config) else tokenizer.begin_id
        return Translation(self, tokenizer, batching, model.max_length, start_id)


@dataclass(frozen=True)
class Translation:
    """How pairs of texts become batches, what the loss is, and how well a model does."""

    config: TranslationConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Most tokens of a source or a target."""
    start_id: int
    """What a target begins with."""

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Sources with an end token, targets between start and end: `{"source": ids, "target": ids}`."""
        begin, end = self.start_id, self.tokenizer.end_id
        sources = self.tokenizer.encode([record["source"] for record in records])
        targets = self.tokenizer.encode([record["target"] for record in records])
        return [
            {"source": [*source, end], "target": [begin, *target, end]}
            for source, target in zip(sources, targets, strict=True)
        ]

    def layout(self, examples: Store) -> Rows:
        """The examples that the model can read and write, in rows, as the batching says."""
        room = np.array([self._room[name] for name in examples.names])
        members = np.flatnonzero((examples.lengths <= room).all(axis=1))
        return Rows(examples, self.batching, pad_id=self.tokenizer.pad_id, members=members)

    def loss(
        self, model: Model, batch: Mapping[str, Array], key: Key[Array, "#B"] | None, *, smooth: bool = True
    ) -> Sums:
        """Cross-entropy of each target token given those before it, as a sum and the number of tokens."""
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        weights, segments = labels != self.tokenizer.pad_id, None
        if "target_segments" in batch:
            here, ahead = batch["target_segments"][:, :-1], batch["target_segments"][:, 1:]
            weights &= here == ahead  # the end of one target does not predict the beginning of the next
            segments = (batch["source_segments"], here)
        logits, balance = model.logits_and_balance(batch["source"], inputs, segments=segments, dropout_key=key)
        if not smooth:
            return cross_entropy(logits, labels, weights)
        total, weight = cross_entropy(logits, labels, weights, label_smoothing=self.config.label_smoothing)
        return total + balance, weight

    def evaluate(
        self,
        model: Model,
        records: Sequence[Record],
        strategy: Strategy,
        *,
        tick: Tick = lambda done: None,
    ) -> Figures:
        """Figures over every record once: loss per token without smoothing, share of exact translations, BLEU, chrF.

        Of a text that is too long for the model the beginning is read; its reference is scored as it is.
        """
        loss, weight, outputs = 0.0, 0.0, [""] * len(records)
        for members, batch in self._batches([self._cut(example) for example in self.encode(records)], strategy):
            placed = strategy.place(batch)
            total, tokens = _evaluation_loss(model, placed, task=self)
            loss, weight = loss + float(total), weight + float(tokens)
            for member, text in zip(members, self._translations(model, placed["source"]), strict=False):
                outputs[member] = text
            tick(len(members))
        references = [record["target"] for record in records]
        exact = sum(map(str.__eq__, outputs, references))
        figures = {"loss": loss / max(weight, 1), "exact_match": exact / len(records)}
        return figures | translation_scores(outputs, references, self.config.bleu_tokenizer)

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps each text from being translated, if anything does: "is empty", "has 300 tokens; ..."."""
        return list(map(self._fault, texts, self.tokenizer.encode(texts)))

    def complete(self, model: Model, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """The translation of each text."""
        encoded = self.tokenizer.encode(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if fault := self._fault(text, ids):
                raise UserError(f"the text {_beginning(text)}{fault}")
        self.tokenizer.warn_if_unknown(encoded, "texts")
        translations = [""] * len(texts)
        for members, batch in self._batches([{"source": [*ids, self.tokenizer.end_id]} for ids in encoded], strategy):
            outputs = self._translations(model, strategy.place(batch)["source"])
            for member, text in zip(members, outputs, strict=False):
                translations[member] = text
        return translations

    def samples(self, model: Model, records: Sequence[Record], strategy: Strategy) -> list[dict[str, str]]:
        """Sources, what the model makes of them, and their targets."""
        faults = self.faults([record["source"] for record in records])
        fitting = [record for record, fault in zip(records, faults, strict=True) if not fault]
        outputs = self.complete(model, [record["source"] for record in fitting], strategy)
        return [
            {
                "source": record["source"],
                "model": output,
                "reference": record["target"],
                "": "✓" if output == record["target"] else "✗",
            }
            for record, output in zip(fitting, outputs, strict=True)
        ]

    def attention(self, model: Model, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """The translation of a text, and what the model attends to while it writes it."""
        (translation,) = self.complete(model, [text], strategy)
        (example,) = self.encode([{"source": text, "target": translation}])
        weights = _attention(model, jnp.array([example["source"]]), jnp.array([example["target"]])[:, :-1])
        source, target = (self.tokenizer.tokens([*example[side]]) for side in ("source", "target"))
        return translation, [
            Watched("cross, by the token being written", weights.cross[:, 0], target[1:], source),
            Watched("encoder", weights.encoder[:, 0], source, source),
            Watched("decoder", weights.decoder[:, 0], target[:-1], target[:-1]),
        ]

    def _batches(
        self, examples: Sequence[Example], strategy: Strategy
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Each example once, with a row of its own: the numbers of the examples of a batch, and the batch."""
        batching = replace(self.batching, pack_length=None)
        rows = Rows(
            Store.of(examples), batching, pad_id=self.tokenizer.pad_id, width_multiple=8, width_limit=self._room
        )
        members = rows.members
        for places, batch in Batches(rows, multiple=strategy.num_devices).once():
            yield members[places], batch

    def _fault(self, text: str, ids: Sequence[int]) -> str | None:
        if not text.strip():
            return "is empty"
        length = len(ids) + 1  # with its end
        return f"has {length} tokens; the model reads at most {self.max_length}" if length > self.max_length else None

    @property
    def _room(self) -> dict[str, int]:
        """The longest sequences that the model can read and write: a target's begin is read, its end is written."""
        return {"source": self.max_length, "target": self.max_length + 1}

    def _cut(self, example: Example) -> Example:
        """An example without what there is no room for before its end token."""
        return {
            name: ids if len(ids) <= self._room[name] else [*ids[: self._room[name] - 1], ids[-1]]
            for name, ids in example.items()
        }

    def _translations(self, model: Model, source: Array) -> list[str]:
        tokens, lengths = map(np.asarray, _search(model, source, task=self))
        return self.tokenizer.decode([row[:length] for row, length in zip(tokens, lengths, strict=True)])


@jax.jit
def _attention(model: Model, source: Int[Array, "1 S"], target: Int[Array, "1 T"]) -> AttentionWeights:
    return model.attention(source, target)


def _beginning(text: str) -> str:
    return f"{text[:20]!r}{'...' * (len(text) > 20)} " if text.strip() else ""


@partial(jax.jit, static_argnames="task")
def _evaluation_loss(model: Model, batch: dict[str, Array], task: Translation) -> Sums:
    return task.loss(model, batch, None, smooth=False)


@partial(jax.jit, static_argnames="task")
def _search(
    model: Model, source: Int[Array, "B S"], task: Translation
) -> tuple[Int[Array, "B length"], Int[Array, "B"]]:
    config, end_id = task.config, task.tokenizer.end_id
    length = min(source.shape[1] + config.extra_length, task.max_length)
    # Each row by its own length: what a source becomes must not depend on what it was batched with.
    limits = jnp.sum(source != task.tokenizer.pad_id, axis=1) + config.extra_length
    state = model.start(source, length)
    prompt = jnp.full((source.shape[0], 1), task.start_id)
    if config.num_beams == 1:
        found = greedy(model.decode, state, prompt, length=length, limits=limits, end_id=end_id)
        return found.tokens, found.lengths
    beams = beam_search(
        model.decode,
        state,
        prompt,
        length=length,
        limits=limits,
        end_id=end_id,
        num_beams=config.num_beams,
        alpha=config.alpha,
        num_results=1,
    )
    return beams.tokens[:, 0], beams.lengths[:, 0]
