"""What a task is: how records become examples, what the loss is, what is predicted and how predictions are scored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array, Float, Key

from transformer_jax.data.batches import Layout
from transformer_jax.data.columns import Column, Example
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.store import Store

Metrics = dict[str, float | str]

WIDTH = 8  # rows that are not for training are padded to a multiple of it, so that sets share compiled shapes


class LossTerm(NamedTuple):
    """A sum over a batch and the weight to divide it by, once all batches, devices and processes are added up."""

    total: Float[Array, ""]
    weight: Float[Array, ""]
    factor: float = 1.0
    """What the mean is multiplied by in the loss: 0 for a metric that is watched and not trained."""


Loss = Mapping[str, LossTerm | tuple[Array, Array]] | tuple[Array, Array]
"""Named terms, whose means times their factors are added up; or the one term there is."""


RESERVED = ("weight", "gradient_norm", "learning_rate")
"""Metrics of a training step, whose names a term of the loss cannot have."""


def loss_terms(loss: Loss) -> dict[str, LossTerm]:
    """A loss as its named terms; the only one of a plain (sum, weight) is called "loss"."""
    if isinstance(loss, tuple):
        return {"loss": LossTerm(*loss)}
    if not isinstance(loss, Mapping):
        raise TypeError(f"a loss is a tuple (sum, weight), or a dict of them by name; got {type(loss).__name__}")
    for name in RESERVED:
        if name in loss:
            raise ValueError(f"a term of the loss is called {name!r}, which is a metric of every step; rename it")
    return {name: LossTerm(*term) for name, term in loss.items()}


def mean_loss(terms: Mapping[str, LossTerm]) -> dict[str, Any]:
    """The loss, and the mean of each term that is not called "loss" itself."""
    means = {name: term.total / (term.weight + (term.weight == 0)) for name, term in terms.items()}
    loss = sum(terms[name].factor * mean for name, mean in means.items() if terms[name].factor)
    return {"loss": loss} | {name: mean for name, mean in means.items() if name != "loss"}


class BestCheckpoint(NamedTuple):
    """The validation metric that marks the best checkpoint of a run, and whether its lowest or highest value does."""

    metric: str
    direction: Literal["lowest", "highest"]


class Results(NamedTuple):
    """What an evaluation gives a task to score."""

    means: Mapping[str, float]
    """The loss and the means of its terms."""
    predictions: Mapping[str, Any]
    """What `predict` gave: by name an array with a leading axis of examples, or of rows where a row is not one example;
    a list of arrays where these have different shapes."""
    examples: Store
    """The encoded examples."""
    records: Sequence[Any]
    """What they were encoded from."""


@dataclass(frozen=True)
class TaskConfig(ABC):
    """The settings of a task, as part of the config of a run. Subclasses are frozen dataclasses."""

    fields: ClassVar[tuple[str, ...]] = ()
    """What the task reads of a record."""
    text_fields: ClassVar[tuple[str, ...]] = ()
    """Those of the fields that are texts, which a tokenizer is trained on."""
    word_fields: ClassVar[tuple[str, ...]] = ()
    """Those that are the words of a text, in a list or with spaces between; a tokenizer is trained on them, too."""
    models: ClassVar[tuple[type, ...]] = (object,)
    """The configs of the models that it can train."""
    decides: ClassVar[tuple[str, ...]] = ()
    """The fields of the model's config that `adapt` sets."""

    def num_extra_ids(self, processor: Any) -> int:
        """Number of ids that the model needs beside those of the tokenizer."""
        return 0

    def adapt(self, model: Any, records: Sequence[Any]) -> Any:
        """The config of a model with all that this task needs, such as a head for the labels in the training set."""
        return model

    @abstractmethod
    def build(self, processor: Any, model: Any, batching: BatchingConfig) -> "Task":
        """The task with a run's processor (a tokenizer, or None), for a model of this config."""


class Task(ABC):
    """How a model is trained and judged. Hashable, such as a frozen dataclass: it is static under `jit`.

    What else a task can do is a protocol of its own, in `transformer_jax.tasks.abilities`.
    """

    unit: ClassVar[str] = "tokens"
    """What the weight of the loss counts."""
    best: ClassVar[BestCheckpoint] = BestCheckpoint("loss", "lowest")
    """What marks the best checkpoint."""
    batching: BatchingConfig

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The columns of an example."""

    @abstractmethod
    def encode(self, records: Sequence[Any]) -> list[Example]:
        """The examples that these records become, in order."""

    @property
    def max_lengths(self) -> dict[str, int]:
        """The most items that the model can take, by column; others have no limit."""
        return {}

    def describe(self) -> str:
        """What else is good to know of a run before it is trained, such as its labels; "" for nothing."""
        return ""

    def layout(self, examples: Store, *, training: bool) -> Layout:
        """How examples lie in rows: packed for training if the batching says so, else one to a row."""
        if training:
            return Rows(examples, self.batching, max_lengths=self.max_lengths, too_long="cut")
        batching = replace(self.batching, pack_length=None)
        return Rows(examples, batching, max_lengths=self.max_lengths, too_long="cut", width_multiple=WIDTH)

    @abstractmethod
    def loss(self, model: Any, batch: Mapping[str, Array], key: Key[Array, "#B"] | None) -> Loss:
        """The loss of a batch; `key` has one dropout key per row in training, and is None in evaluation."""

    def predict(self, model: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        """What the model says of each row of a batch, to be scored: arrays with a leading row axis."""
        return {}

    def score(self, results: Results) -> Metrics:
        """Metrics of a split, besides the loss and the means of its terms."""
        return {}
