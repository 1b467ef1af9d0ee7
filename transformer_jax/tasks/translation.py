"""Translation: a source text to a target text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Key

from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.source import Record
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import beam_search, greedy
from transformer_jax.errors import UserError
from transformer_jax.functional import chunked_cross_entropy
from transformer_jax.models import T5, T5Config, Transformer, TransformerConfig
from transformer_jax.tasks.abilities import AttentionMap, attention_map, check_texts
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import BleuTokenizer, translation_scores
from transformer_jax.tasks.task import Loss, Metrics, Results, Task, TaskConfig

Model = Transformer | T5


@dataclass(frozen=True)
class BeamSearchConfig:
    """How a translation is searched for."""

    num_beams: int = 4
    """Hypotheses kept at each step of the beam search; 1 is greedy decoding."""
    alpha: float = 0.6
    """Exponent of the length penalty ((5 + n) / 6)^alpha that log-probabilities are divided by."""
    extra_length: int = 50
    """Most tokens that a translation may have beyond the number of its source."""

    def __post_init__(self):
        if self.num_beams < 1:
            raise UserError(f"num_beams must be at least 1; got {self.num_beams}")


@dataclass(frozen=True)
class TranslationConfig(TaskConfig):
    """A target text for each source text: for a Transformer or a T5."""

    label_smoothing: float = 0.1
    """Fraction of the target distribution that is spread over all tokens (Vaswani et al. 2017, 5.4)."""
    bleu_tokenizer: BleuTokenizer = "13a"
    """How sacreBLEU finds the words of a text: 13a for most languages, zh for Chinese, char for Japanese and others."""
    decoding: BeamSearchConfig = BeamSearchConfig()

    fields: ClassVar = ("source", "target")
    text_fields: ClassVar = ("source", "target")
    models: ClassVar = (TransformerConfig, T5Config)
    decides: ClassVar = ("lm_head",)

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1; got {self.label_smoothing}")

    def adapt(self, model: TransformerConfig | T5Config, records: Sequence[Record]) -> TransformerConfig | T5Config:
        """With an output layer."""
        return replace(model, lm_head=True) if isinstance(model, T5Config) else model

    def build(
        self, processor: Tokenizer, model: TransformerConfig | T5Config, batching: BatchingConfig
    ) -> "Translation":
        """The task with a run's tokenizer, for a model of this config."""
        if not model.num_decoder_layers:
            raise UserError(
                "the model is an encoder alone (model.num_decoder_layers=0), and translation needs a decoder"
            )
        start_id = processor.pad_id if isinstance(model, T5Config) else processor.begin_id
        return Translation(self, processor, batching, model.max_length, start_id)


@dataclass(frozen=True)
class Translation(Task):
    """Pairs of texts, several to a row where they are packed."""

    config: TranslationConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Most tokens of a source or a target."""
    start_id: int
    """What a target begins with."""

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of the source and of the target."""
        ids = token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id)
        return {"source": ids, "target": ids}

    @property
    def max_lengths(self) -> dict[str, int]:
        """The longest that the model can read and write: a target's begin is read, its end is written."""
        return {"source": self.max_length, "target": self.max_length + 1}

    def encode(self, records: Sequence[Record]) -> list[Example]:
        """Sources with an end token, targets between start and end."""
        begin, end = self.start_id, self.tokenizer.end_id
        sources = self.tokenizer.encode([record["source"] for record in records])
        targets = self.tokenizer.encode([record["target"] for record in records])
        return [
            {"source": [*source, end], "target": [begin, *target, end]}
            for source, target in zip(sources, targets, strict=True)
        ]

    def layout(self, examples: Store, *, training: bool) -> Rows:
        """As for any task, but what is too long for the model is left out of the training: half a target is wrong."""
        if training:
            return Rows(examples, self.batching, max_lengths=self.max_lengths, too_long="leave_out")
        return super().layout(examples, training=False)  # type: ignore[return-value]

    def loss(self, model: Model, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of each target token given those before it; in evaluation without smoothing."""
        inputs, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        here, ahead = batch["target_segments"][:, :-1], batch["target_segments"][:, 1:]
        weights = (here == ahead) & (ahead > 0)  # the end of one target does not predict the beginning of the next
        segments = (batch["source_segments"], here) if self.batching.pack_length is not None else None
        x, auxiliary_loss = model.hidden_and_balance(batch["source"], inputs, segments=segments, dropout_key=key)
        if key is None:
            return chunked_cross_entropy(x, model.logits, labels, weights)
        smoothing = self.config.label_smoothing
        total, weight = chunked_cross_entropy(x, model.logits, labels, weights, label_smoothing=smoothing)
        return total + auxiliary_loss, weight

    def predict(self, model: Model, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The tokens of the translation of each source, and how many there are."""
        source, config, end_id = batch["source"], self.config.decoding, self.tokenizer.end_id
        length = min(source.shape[1] + config.extra_length, self.max_length)
        # Each row by its own length: what a source becomes must not depend on what it was batched with.
        limits = jnp.sum(batch["source_segments"] > 0, axis=1) + config.extra_length
        state = model.start(source, length)
        prompt = jnp.full((source.shape[0], 1), self.start_id)
        if config.num_beams == 1:
            found = greedy(model.decode, state, prompt, length=length, limits=limits, end_id=end_id)
            return {"tokens": found.tokens, "lengths": found.lengths}
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
        return {"tokens": beams.tokens[:, 0], "lengths": beams.lengths[:, 0]}

    def score(self, results: Results) -> Metrics:
        """Fraction of exact translations, BLEU and chrF.

        Of a text that is too long for the model the beginning is read; its reference is scored as it is.
        """
        outputs = self._texts(results.predictions)
        references = [record["target"] for record in results.records]
        exact = sum(map(str.__eq__, outputs, references)) / len(references)
        return {"exact_match": exact} | translation_scores(outputs, references, self.config.bleu_tokenizer)

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each text cannot be translated, if it cannot: "is empty", "has 300 tokens; ..."."""
        return [
            self._problem(text, len(ids) + 1) for text, ids in zip(texts, self.tokenizer.encode(texts), strict=True)
        ]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """The translation of each text."""
        check_texts(self, texts)
        encoded = self.tokenizer.encode(texts)
        self.tokenizer.warn_if_unknown(encoded, "texts")
        examples = [{"source": [*ids, self.tokenizer.end_id]} for ids in encoded]
        return self._texts(predictor.over(Translation.predict, examples))

    def samples(self, records: Sequence[Record], predictor: Predictor) -> list[dict[str, str]]:
        """Sources, what the model makes of them, and their targets."""
        problems = self.problems([record["source"] for record in records])
        fitting = [record for record, problem in zip(records, problems, strict=True) if not problem]
        outputs = self.write([record["source"] for record in fitting], predictor)
        return [
            {
                "source": record["source"],
                "model": output,
                "reference": record["target"],
                "": "✓" if output == record["target"] else "✗",
            }
            for record, output in zip(fitting, outputs, strict=True)
        ]

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """The translation of a text, and what the model attends to while it writes it."""
        (translation,) = self.write([text], predictor)
        examples = self.encode([{"source": text, "target": translation}])
        length = self.max_length + 1
        found = predictor.over(Translation._attention, examples, self.columns, max_length=length, batch_rows=1)
        source, target = (self.tokenizer.tokens([*examples[0][side]]) for side in ("source", "target"))
        return translation, [
            attention_map("cross, by the token being written", found["cross"][0], target[1:], source),
            attention_map("encoder", found["encoder"][0], source, source),
            attention_map("decoder", found["decoder"][0], target[:-1], target[:-1]),
        ]

    def _attention(self, model: Model, batch: Mapping[str, Array]) -> dict[str, Array]:
        weights = model.attention(batch["source"], batch["target"][:, :-1])
        return {name: jnp.moveaxis(array, 1, 0) for name, array in weights._asdict().items()}

    def _problem(self, text: str, length: int) -> str | None:
        if not text.strip():
            return "is empty"
        return f"has {length} tokens; the model reads at most {self.max_length}" if length > self.max_length else None

    def _texts(self, predictions: Mapping[str, Sequence]) -> list[str]:
        rows = zip(predictions["tokens"], predictions["lengths"], strict=True)
        return self.tokenizer.decode([tokens[:length] for tokens, length in rows])
