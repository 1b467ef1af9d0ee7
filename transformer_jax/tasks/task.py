"""What every task says of itself."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from transformer_jax.data.batches import Batches, Layout
from transformer_jax.data.store import Example, Store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy

Figures = dict[str, float | str]
Sums = tuple[Float[Array, ""], Float[Array, ""]]
"""A sum of losses and the weight to divide it by, once all of them are added up."""

Tick = Callable[[int], None]
"""Called after each batch of an evaluation with the number of records it had; may raise to stop."""


class Watched(NamedTuple):
    """What attends to what in one place of a model: the weights of all layers and heads for one text."""

    title: str
    weights: Float[Array, "L N T S"]
    queries: list[str]
    """The tokens that attend,"""
    keys: list[str]
    """and those that they attend to."""


class Task(Protocol):
    """How records become batches, what the loss is, and how well a model does. Hashable: it is static under `jit`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes ids of text."""

    def encode(self, records: Sequence[Any]) -> list[Example]:
        """Records as named sequences of ids."""

    def layout(self, examples: Store) -> Layout:
        """How encoded examples lie in the rows of training batches."""

    def loss(self, model: Any, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Sums:
        """The loss of a training batch."""

    def evaluate(
        self, model: Any, records: Sequence[Any], strategy: Strategy, *, tick: Tick = lambda done: None
    ) -> Figures:
        """Figures over every record once."""

    def faults(self, texts: Sequence[str]) -> list[str | None]:
        """What keeps each text from being given to `complete`, if anything does: "is empty", "has 300 tokens; ..."."""

    def complete(self, model: Any, texts: Sequence[str], strategy: Strategy) -> list[str]:
        """What the model writes for each text."""

    def samples(self, model: Any, records: Sequence[Any], strategy: Strategy) -> list[dict[str, str]]:
        """What the model makes of some of these records, to be looked at: named texts, the first its input."""

    def attention(self, model: Any, text: str, strategy: Strategy) -> tuple[str, list[Watched]]:
        """What the model writes for a text, if it writes, and what it attends to."""


def require_head(lm_head: bool) -> None:
    """Raise if a model lacks the output layer."""
    if not lm_head:
        raise UserError("model.lm_head is off, and the task trains it; set it")


def loss_and_perplexity(sums: Mapping[str, float]) -> Figures:
    """The loss per token, and what it is the logarithm of."""
    loss = sums["loss"] / max(sums["tokens"], 1)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700))}


def listed(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Tokens one beside the other, for people."""
    return " · ".join(text.strip() for text in tokenizer.decode([[id] for id in ids]))


class Counted(Protocol):
    """A task whose figures are made of sums over batches."""

    def sums(self, model: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        """What is added up over the batches of an evaluation."""


def sum_over(
    task: Counted, model: Any, layout: Layout, strategy: Strategy, *, num_records: int, tick: Tick
) -> dict[str, float]:
    """The sums of a task over all rows of a layout."""
    batches = Batches(layout, multiple=strategy.num_devices)
    totals: dict[str, float] = {}
    done = 0
    for number, (_, batch) in enumerate(batches.once(), 1):
        for name, value in _sums(model, strategy.place(batch), task=task).items():
            totals[name] = totals.get(name, 0.0) + float(value)
        due = num_records * number // batches.per_epoch
        tick(due - done)
        done = due
    return totals


@partial(jax.jit, static_argnames="task")
def _sums(model: Any, batch: dict[str, Array], task: Counted) -> dict[str, Array]:
    return task.sums(model, batch)
