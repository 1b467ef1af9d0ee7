"""Translation: a source text to a target text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.data.batches import Batches, BatchingConfig, Example
from transformer_jax.data.source import Record
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import beam_search, greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import Transformer
from transformer_jax.parallel import Strategy


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

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Sources with an end token, targets between begin and end: `{"source": ids, "target": ids}`."""
        begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
        sources = self.tokenizer.encode([record["source"] for record in records])
        targets = self.tokenizer.encode([record["target"] for record in records])
        return [
            {"source": [*source, end], "target": [begin, *target, end]}
            for source, target in zip(sources, targets, strict=True)
        ]

    def fits(self, example: Example) -> bool:
        """Whether an example is not longer than the model can read and write."""
        return max(len(example["source"]), len(example["target"]) - 1) <= self.max_length

    def loss(
        self, model: Transformer, batch: Mapping[str, Array], key: Key[Array, "#B"] | None, *, smooth: bool = True
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Cross-entropy of each target token given those before it, as a sum and the number of tokens."""
        logits = model(batch["source"], batch["target"][:, :-1], dropout_key=key)
        labels = batch["target"][:, 1:]
        label_smoothing = self.label_smoothing if smooth else 0.0
        return cross_entropy(logits, labels, labels != self.tokenizer.pad_id, label_smoothing=label_smoothing)

    def evaluate(
        self,
        model: Transformer,
        records: Sequence[Record],
        strategy: Strategy,
        *,
        tick: Callable[[int], None] = lambda done: None,
    ) -> dict[str, float]:
        """Loss per token (without smoothing) and the share of sources translated exactly, over every record once.

        `tick` is called after each batch with its number of records, and may raise to stop.
        """
        batches = self._batches(self.encode(records), strategy)
        loss, weight, exact = 0.0, 0.0, 0
        for members, batch in batches.once():
            placed = strategy.place(batch)
            total, tokens = _evaluation_loss(model, placed, task=self)
            outputs = self._translations(model, placed["source"])
            loss, weight = loss + float(total), weight + float(tokens)
            for text, member in zip(outputs, members, strict=False):
                exact += text == records[member]["target"]
            tick(len(members))
        return {"loss": loss / max(weight, 1), "exact_match": exact / len(records)}

    def translate(
        self, model: Transformer, texts: Sequence[str], strategy: Strategy, *, first_number: int = 1
    ) -> list[str]:
        """The translation of each text. Errors count texts from `first_number`."""
        end = self.tokenizer.end_id
        sources = [[*ids, end] for ids in self.tokenizer.encode(texts)]
        for number, source in enumerate(sources, first_number):
            if len(source) > self.max_length:
                raise UserError(f"line {number} has {len(source)} tokens; the model reads at most {self.max_length}")
        translations = [""] * len(texts)
        for members, batch in self._batches([{"source": source} for source in sources], strategy).once():
            outputs = self._translations(model, strategy.place(batch)["source"])
            for text, member in zip(outputs, members, strict=False):
                translations[member] = text
        return translations

    def _batches(self, examples: Sequence[Example], strategy: Strategy) -> Batches:
        return Batches(
            examples, self.batching, pad_id=self.tokenizer.pad_id, multiple=strategy.num_devices, width_multiple=8
        )

    def _translations(self, model: Transformer, source: Array) -> list[str]:
        tokens, lengths = map(np.asarray, _search(model, source, task=self))
        return self.tokenizer.decode([row[:length] for row, length in zip(tokens, lengths, strict=True)])


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
    )
    return beams.tokens[:, 0], beams.lengths[:, 0]
