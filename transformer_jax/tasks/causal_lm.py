"""Causal language modelling: each token from those before it (Radford et al. 2019)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from transformer_jax.data.chunks import Chunks
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.source import Document
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding import sample
from transformer_jax.errors import UserError
from transformer_jax.functional import cross_entropy
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.task import Figures, Sums, Tick, Watched, loss_and_perplexity, require_head, sum_over

BATCH = 32  # texts continued at once
WIDTH = 16  # prompts are padded to a multiple of it, so that lengths share shapes


@dataclass(frozen=True)
class CausalLMConfig:
    """The next token of a text: for a GPT."""

    separate: bool = True
    """Put each document between a begin and an end token, and let none see another. Without, all text is one stream."""
    new_tokens: int = 200
    """Most tokens to write after a text."""
    temperature: float = 1.0
    """Divides the logits that a token is drawn by; 0 takes the likeliest."""
    top_k: int | None = None
    """Draw only among this many of the likeliest tokens."""
    top_p: float = 1.0
    """Draw only among the likeliest tokens that have this much probability together."""
    seed: int = 0
    """Of what is drawn."""

    fields: ClassVar = ("text",)
    models: ClassVar = (GPTConfig,)

    def __post_init__(self):
        if self.new_tokens < 1:
            raise UserError(f"new_tokens must be at least 1; got {self.new_tokens}")

    def num_extra_ids(self, tokenizer: Tokenizer) -> int:
        """Ids that the model needs beside those of the tokenizer."""
        return 0

    def build(self, tokenizer: Tokenizer, model: GPTConfig, batching: BatchingConfig) -> "CausalLM":
        """The task with this tokenizer, for a model of this config."""
        require_head(model.lm_head)
        if tokenizer.add_begin is None:
            tokenizer = tokenizer.with_begin(self.separate)
        return CausalLM(self, tokenizer, batching, model.max_length)


@dataclass(frozen=True)
class CausalLM:
    """How documents become batches, what the loss is, and how well a model does."""

    config: CausalLMConfig
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Tokens of a row."""

    def encode(self, records: Sequence[Document]) -> list[Example]:
        """Documents, between begin and end if they are separate: `{"text": ids}`."""
        encoded = self.tokenizer.encode([record["text"] for record in records])
        if not self.config.separate:
            return [{"text": ids} for ids in encoded]
        return [{"text": [self.tokenizer.begin_id, *ids, self.tokenizer.end_id]} for ids in encoded]

    def layout(self, examples: Store) -> Chunks:
        """The documents one after the other, in rows of the length that the model reads."""
        rows = self.batching.batch_rows(self.max_length)
        return Chunks(examples, length=self.max_length, batch_rows=rows, pad_id=self.tokenizer.pad_id)

    def loss(self, model: GPT, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Sums:
        """Cross-entropy of each token given those before it, as a sum and the number of tokens."""
        total, weight, balance = self._loss(model, batch, key)
        return total + balance, weight

    def sums(self, model: GPT, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The loss, without what experts add to it, and the number of tokens."""
        total, weight, _ = self._loss(model, batch, None)
        return {"loss": total, "tokens": weight}

    def _loss(self, model: GPT, batch: Mapping[str, Array], key: Array | None) -> tuple[Array, Array, Array]:
        ids, segments = batch["text"], batch["text_segments"]
        if not self.config.separate:
            segments = jnp.minimum(segments, 1)
        here, ahead = segments[:, :-1], segments[:, 1:]
        weights = (here == ahead) & (ahead > 0)  # the end of a document does not predict the beginning of the next
        logits, balance = model.logits_and_balance(ids[:, :-1], valid=here > 0, segments=here, dropout_key=key)
        return *cross_entropy(logits, ids[:, 1:], weights), balance

    def evaluate(
        self, model: GPT, records: Sequence[Document], strategy: Strategy, *, tick: Tick = lambda done: None
    ) -> Figures:
        """Loss and perplexity per token over every token once; bits per byte and character if none is unknown."""
        examples = Store.of(self.encode(list(records)))
        layout = self.layout(examples)
        sums = sum_over(self, model, layout, strategy, num_records=len(records), tick=tick)
        total, figures = sums["loss"], loss_and_perplexity(sums)
        if self.tokenizer.unknown_id is None or not (examples.ids["text"] == self.tokenizer.unknown_id).any():
            texts = [record["text"] for record in records]
            figures["bits_per_byte"] = total / math.log(2) / max(sum(len(text.encode()) for text in texts), 1)
            figures["bits_per_character"] = total / math.log(2) / max(sum(map(len, texts)), 1)
        return figures

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps each text from being continued, if anything does."""
        return [None if prompt else "is empty" for prompt in self._prompts(texts)]

    def complete(self, model: GPT, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """A continuation of each text; where the model cannot see all that was written, from the last of it."""
        prompts = self._prompts(texts)
        if not all(prompts):
            raise UserError(f"text {prompts.index([])} is empty; there is nothing to go on from")
        self.tokenizer.warn_if_unknown([prompt[bool(self.tokenizer.add_begin) :] for prompt in prompts], "prompts")
        return self.tokenizer.decode(
            [
                ids
                for start in range(0, len(prompts), BATCH)
                for ids in self._continue(model, prompts[start : start + BATCH], first=start)
            ]
        )

    def samples(self, model: GPT, records: Sequence[Document], strategy: Strategy) -> list[dict[str, str]]:
        """Beginnings of documents, and how the model goes on."""
        begun = [ids[: self.max_length // 2] for ids in self.tokenizer.encode([record["text"] for record in records])]
        texts = [text for text in self.tokenizer.decode(begun) if text.strip()]
        outputs = self.complete(model, texts, strategy)
        return [{"text": text, "model": output} for text, output in zip(texts, outputs, strict=True)]

    def attention(self, model: GPT, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """A continuation of a text, and what its tokens attend to."""
        (continuation,) = self.complete(model, [text], strategy)
        (ids,) = self._prompts([text])
        tokens = self.tokenizer.tokens(ids)
        return continuation, [Watched("decoder", model.attention(jnp.array([ids]))[:, 0], tokens, tokens)]

    def _prompts(self, texts: Sequence[str]) -> list[list[int]]:
        first = [self.tokenizer.begin_id] if self.tokenizer.add_begin else []
        return [[*first, *ids] for ids in self.tokenizer.encode(texts)]

    def _continue(self, model: GPT, prompts: Sequence[Sequence[int]], *, first: int) -> list[list[int]]:
        """What is written after each prompt, in as many rounds as the model's length asks for."""
        written: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        for turn in itertools.count():
            left = [self.config.new_tokens - len(written[row]) for row in going]
            # Room for half a length of new tokens, or for all that are left to write; the rest is what is read.
            room = [min(count, max(1, self.max_length // 2)) for count in left]
            seen = [
                [*prompts[row], *written[row]][-(self.max_length - r) :] for row, r in zip(going, room, strict=True)
            ]
            limits = [min(count, self.max_length - len(ids)) for count, ids in zip(left, seen, strict=True)]
            numbers = np.array([[first + row, turn] for row in going])
            found = self._turn(model, seen, np.array(limits), numbers)
            for row, ids in zip(going, found, strict=True):
                written[row] += ids
            going = [
                row
                for row, ids, limit in zip(going, found, limits, strict=True)
                if len(ids) == limit and len(written[row]) < self.config.new_tokens
            ]
            if not going:
                return written
        raise AssertionError

    def _turn(
        self, model: GPT, prompts: Sequence[Sequence[int]], limits: np.ndarray, numbers: np.ndarray
    ) -> list[list[int]]:
        """What is written after each prompt. They are padded on the left, so that all go on at the same place."""
        width = -(-max(map(len, prompts)) // WIDTH) * WIDTH
        ids = np.full((BATCH, width), self.tokenizer.pad_id, np.int32)
        for row, prompt in zip(ids, prompts, strict=False):
            row[width - len(prompt) :] = prompt
        empty = BATCH - len(prompts)
        begins = np.array([width - len(prompt) for prompt in prompts] + [width - 1] * empty, np.int32)
        limits, numbers = np.pad(limits, (0, empty)), np.pad(numbers, ((0, empty), (0, 0)))
        tokens, lengths = map(np.asarray, _sample(model, ids, begins, limits, numbers, task=self))
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)][: len(prompts)]


@partial(jax.jit, static_argnames="task")
def _sample(
    model: GPT,
    prompt: Int[Array, "B P"],
    begins: Int[Array, "B"],
    limits: Int[Array, "B"],
    numbers: Int[Array, "B 2"],
    task: CausalLM,
) -> tuple[Int[Array, "B length"], Int[Array, "B"]]:
    config = task.config
    length = min(config.new_tokens, task.max_length - 1)
    keys = jax.vmap(lambda pair: jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), pair[0]), pair[1]))
    found = sample(
        model.decode,
        model.start(prompt.shape[0], prompt.shape[1] + length, begins),
        prompt,
        keys(numbers),
        length=length,
        limits=limits,
        end_id=task.tokenizer.end_id,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
    )
    return found.tokens, found.lengths
