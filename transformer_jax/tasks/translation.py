"""Translation: a source text to a target text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.data.batches import Batches
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.source import Record
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import beam_search, greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import Transformer
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.scores import BleuTokenizer, translation_scores


@dataclass(frozen=True)
class DecodingConfig:
    """How translations are searched for."""

    num_beams: int = 4
    """Hypotheses kept at each step; 1 is greedy."""
    alpha: float = 0.6
    """Exponent of the length penalty ((5 + n) / 6)^alpha."""
    extra_length: int = 50
    """A translation has at most this many tokens more than its source."""

    def __post_init__(self):
        if self.num_beams < 1:
            raise UserError(f"num_beams must be at least 1; got {self.num_beams}")


@dataclass(frozen=True)
class Translation:
    """How pairs of texts become batches, what the loss is, and how well a model does."""

    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a source or a target."""
    label_smoothing: float
    decoding: DecodingConfig
    batching: BatchingConfig
    bleu_tokenizer: BleuTokenizer = "13a"

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Sources with an end token, targets between begin and end: `{"source": ids, "target": ids}`."""
        begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
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
        self, model: Transformer, batch: Mapping[str, Array], key: Key[Array, "#B"] | None, *, smooth: bool = True
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Cross-entropy of each target token given those before it, as a sum and the number of tokens."""
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        weights, segments = labels != self.tokenizer.pad_id, None
        if "target_segments" in batch:
            here, ahead = batch["target_segments"][:, :-1], batch["target_segments"][:, 1:]
            weights &= here == ahead  # the end of one target does not predict the beginning of the next
            segments = (batch["source_segments"], here)
        logits = model(batch["source"], inputs, segments=segments, dropout_key=key)
        label_smoothing = self.label_smoothing if smooth else 0.0
        return cross_entropy(logits, labels, weights, label_smoothing=label_smoothing)

    def evaluate(
        self,
        model: Transformer,
        records: Sequence[Record],
        strategy: Strategy,
        *,
        tick: Callable[[int], None] = lambda done: None,
    ) -> dict[str, float | str]:
        """Figures over every record once: loss per token without smoothing, share of exact translations, BLEU, chrF.

        Of a text that is too long for the model the beginning is read; its reference is scored as it is.
        `tick` is called after each batch with its number of records, and may raise to stop.
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
        return figures | translation_scores(outputs, references, self.bleu_tokenizer)

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps each text from being translated, if anything does: "is empty", "has 300 tokens; ..."."""
        return list(map(self._fault, texts, self.tokenizer.encode(texts)))

    def translate(self, model: Transformer, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """The translation of each text."""
        encoded = self.tokenizer.encode(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if fault := self._fault(text, ids):
                raise UserError(f"the text {_beginning(text)}{fault}")
        translations = [""] * len(texts)
        for members, batch in self._batches([{"source": [*ids, self.tokenizer.end_id]} for ids in encoded], strategy):
            outputs = self._translations(model, strategy.place(batch)["source"])
            for member, text in zip(members, outputs, strict=False):
                translations[member] = text
        return translations

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

    def _translations(self, model: Transformer, source: Array) -> list[str]:
        tokens, lengths = map(np.asarray, _search(model, source, task=self))
        return self.tokenizer.decode([row[:length] for row, length in zip(tokens, lengths, strict=True)])


def _beginning(text: str) -> str:
    return f"{text[:20]!r}{'...' * (len(text) > 20)} " if text.strip() else ""


@partial(jax.jit, static_argnames="task")
def _evaluation_loss(model: Transformer, batch: dict[str, Array], task: Translation) -> tuple[Array, Array]:
    return task.loss(model, batch, None, smooth=False)


@partial(jax.jit, static_argnames="task")
def _search(
    model: Transformer, source: Int[Array, "B S"], task: Translation
) -> tuple[Int[Array, "B length"], Int[Array, "B"]]:
    config, end_id = task.decoding, task.tokenizer.end_id
    length = min(source.shape[1] + config.extra_length, task.max_length)
    # Each row by its own length: what a source becomes must not depend on what it was batched with.
    limits = jnp.sum(source != task.tokenizer.pad_id, axis=1) + config.extra_length
    state = model.start(source, length)
    prompt = jnp.full((source.shape[0], 1), task.tokenizer.begin_id)
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
