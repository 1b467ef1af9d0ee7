"""Causal language modelling: each token from those before it (Radford et al. 2019)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from transformer_jax.data.chunks import Chunks
from transformer_jax.data.columns import Column, Example, token_column
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import sample
from transformer_jax.errors import UserError
from transformer_jax.functional import chunked_cross_entropy
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.tasks.abilities import AttentionMap, attention_map
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.scores import perplexity
from transformer_jax.tasks.task import Loss, Metrics, Results, Task, TaskConfig


@dataclass(frozen=True)
class SamplingConfig:
    """How a language model continues a text."""

    new_tokens: int = 200
    """Most tokens to write after a text."""
    temperature: float = 1.0
    """Divisor of the logits that a token is sampled by; 0 takes the most likely token."""
    top_k: int | None = None
    """Number of the most likely tokens to sample from; None samples from all."""
    top_p: float = 1.0
    """Probability of the most likely tokens to sample from, all together."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self):
        if self.new_tokens < 1:
            raise UserError(f"new_tokens must be at least 1; got {self.new_tokens}")


@dataclass(frozen=True)
class CausalLMConfig(TaskConfig):
    """The next token of a text: for a GPT."""

    separate: bool = True
    """Put each document between a begin and an end token and let none see another; otherwise all text is one stream."""
    decoding: SamplingConfig = SamplingConfig()

    fields: ClassVar = ("text",)
    text_fields: ClassVar = ("text",)
    models: ClassVar = (GPTConfig,)
    decides: ClassVar = ("lm_head",)

    def adapt(self, model: GPTConfig, records: Sequence[Document]) -> GPTConfig:
        """With an output layer."""
        return replace(model, lm_head=True)

    def build(self, processor: Tokenizer, model: GPTConfig, batching: BatchingConfig) -> "CausalLM":
        """The task with a run's tokenizer, for a model of this config."""
        if processor.add_begin is None:
            processor = processor.with_begin(self.separate)
        return CausalLM(self, processor, batching, model.max_length)


@dataclass(frozen=True)
class CausalLM(Task):
    """Documents one after the other, in rows of the length that the model reads."""

    config: CausalLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row."""

    @property
    def columns(self) -> dict[str, Column]:
        """The ids of a document."""
        return {"text": token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id)}

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """Documents, between begin and end if they are separate."""
        encoded = self.tokenizer.encode([record["text"] for record in records])
        if not self.config.separate:
            return [{"text": ids} for ids in encoded]
        return [{"text": [self.tokenizer.begin_id, *ids, self.tokenizer.end_id]} for ids in encoded]

    def layout(self, examples: Store, *, training: bool) -> Chunks:
        """The documents as one stream."""
        return Chunks(examples, length=self.max_length, batch_rows=self.batching.batch_rows(self.max_length))

    def loss(self, model: GPT, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """Cross-entropy of each token given those before it."""
        ids, segments = batch["text"], batch["text_segments"]
        if not self.config.separate:
            segments = jnp.minimum(segments, 1)
        here, ahead = segments[:, :-1], segments[:, 1:]
        weights = (here == ahead) & (ahead > 0)  # the end of a document does not predict the beginning of the next
        x, auxiliary_loss = model.hidden_and_balance(ids[:, :-1], valid=here > 0, segments=here, dropout_key=key)
        total, weight = chunked_cross_entropy(x, model.logits, ids[:, 1:], weights)
        return total if key is None else total + auxiliary_loss, weight

    def score(self, results: Results) -> Metrics:
        """Perplexity; bits per byte and character if no token is unknown."""
        loss = results.means["loss"]
        metrics: Metrics = {"perplexity": perplexity(loss)}
        ids = results.examples.values["text"]
        if self.tokenizer.unknown_id is None or not (ids == self.tokenizer.unknown_id).any():
            texts = [record["text"] for record in results.records]
            predicted = len(ids) - (len(texts) if self.config.separate else 1)  # all but the first of a text
            bits = loss / math.log(2) * predicted
            metrics["bits_per_byte"] = bits / max(sum(len(text.encode()) for text in texts), 1)
            metrics["bits_per_character"] = bits / max(sum(map(len, texts)), 1)
        return metrics

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each text cannot be continued, if it cannot."""
        return [None if prompt else "is empty" for prompt in self._prompts(texts)]

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """A continuation of each text; where the model cannot see all that was written, from the last of it."""
        prompts = self._prompts(texts)
        if not all(prompts):
            raise UserError(f"text {prompts.index([])} is empty; there is nothing to go on from")
        self.tokenizer.warn_if_unknown([prompt[bool(self.tokenizer.add_begin) :] for prompt in prompts], "prompts")
        written: list[list[int]] = [[] for _ in prompts]
        unfinished, turn = list(range(len(prompts))), 0
        while unfinished:
            examples = [self._next_turn(prompts[row], written[row], row, turn) for row in unfinished]
            found = predictor.over(CausalLM._sample, examples, self._prompt_columns, max_length=self.max_length)
            for row, tokens, length in zip(unfinished, found["tokens"], found["lengths"], strict=True):
                written[row] += tokens[:length].tolist()
            unfinished = [
                row
                for row, length, example in zip(unfinished, found["lengths"], examples, strict=True)
                if length == example["limit"] and len(written[row]) < self.config.decoding.new_tokens
            ]
            turn += 1
        return self.tokenizer.decode(written)

    def samples(self, records: Sequence[Document], predictor: Predictor) -> list[dict[str, str]]:
        """Beginnings of documents, and how the model goes on."""
        begun = [ids[: self.max_length // 2] for ids in self.tokenizer.encode([record["text"] for record in records])]
        texts = [text for text in self.tokenizer.decode(begun) if text.strip()]
        outputs = self.write(texts, predictor)
        return [{"text": text, "model": output} for text, output in zip(texts, outputs, strict=True)]

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """A continuation of a text, and what its tokens attend to."""
        (continuation,) = self.write([text], predictor)
        (ids,) = self._prompts([text])
        columns = {"text": self.columns["text"]}
        length = max(len(ids), self.max_length)
        found = predictor.over(CausalLM._attention, [{"text": ids}], columns, max_length=length, batch_rows=1)
        tokens = self.tokenizer.tokens(ids)
        return continuation, [attention_map("decoder", found["weights"][0], tokens, tokens)]

    def _prompts(self, texts: Sequence[str]) -> list[list[int]]:
        first = [self.tokenizer.begin_id] if self.tokenizer.add_begin else []
        return [[*first, *ids] for ids in self.tokenizer.encode(texts)]

    @property
    def _prompt_columns(self) -> dict[str, Column]:
        number = Column(ragged=False)
        return {"prompt": self.columns["text"], "limit": number, "row": number, "turn": number}

    def _next_turn(self, prompt: list[int], written: list[int], row: int, turn: int) -> dict[str, Any]:
        """What is read and how many tokens are written next, in as many turns as the model's length asks for."""
        missing = self.config.decoding.new_tokens - len(written)
        # Room for half a length of new tokens, or for all that are left to write; the rest is what is read.
        room = min(missing, max(1, self.max_length // 2))
        ids = [*prompt, *written][-(self.max_length - room) :]
        return {"prompt": ids, "limit": min(missing, self.max_length - len(ids)), "row": row, "turn": turn}

    def _sample(self, model: GPT, batch: Mapping[str, Array]) -> dict[str, Array]:
        """What is written after each prompt. They are padded on the left, so that all go on at the same position."""
        config, width = self.config.decoding, batch["prompt"].shape[1]
        row_starts = width - jnp.sum(batch["prompt_segments"] > 0, axis=1)
        index = jnp.maximum(jnp.arange(width)[None] - row_starts[:, None], 0)
        prompt = jnp.take_along_axis(batch["prompt"], index, axis=1)
        row_starts = jnp.minimum(row_starts, width - 1)  # of rows that only fill up the batch
        length = min(config.new_tokens, self.max_length - 1)

        def row_key(row: Array, turn: Array) -> Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), row), turn)

        found = sample(
            model.decode,
            model.start(prompt.shape[0], width + length, row_starts),
            prompt,
            jax.vmap(row_key)(batch["row"], batch["turn"]),
            length=length,
            limits=batch["limit"],
            end_id=self.tokenizer.end_id,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )
        return {"tokens": found.tokens, "lengths": found.lengths}

    def _attention(self, model: GPT, batch: Mapping[str, Array]) -> dict[str, Array]:
        return {"weights": jnp.moveaxis(model.attention(batch["text"]), 1, 0)}
