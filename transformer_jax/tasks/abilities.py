"""What some tasks can do besides being trained and scored: write text, show samples, give attention maps."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.tasks.predictor import Predictor


class AttentionMap(NamedTuple):
    """What attends to what at one site of a model: the weights of all layers and heads for one text."""

    title: str
    weights: Float[np.ndarray, "L N T S"]
    queries: list[str]
    """The tokens that attend."""
    keys: list[str]
    """The tokens that are attended to."""


def listed_tokens(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Tokens one beside the other, for people."""
    return " · ".join(text.strip() for text in tokenizer.decode([[id] for id in ids]))


def attention_map(
    title: str,
    weights: Float[np.ndarray, "L N T S"],
    queries: list[str],
    keys: list[str],
    *,
    left_padding: bool = False,
) -> AttentionMap:
    """The attention of a row that may be padded, for its tokens alone."""
    rows, columns = (slice(-len(tokens), None) if left_padding else slice(len(tokens)) for tokens in (queries, keys))
    return AttentionMap(title, weights[:, :, rows, columns], queries, keys)


@runtime_checkable
class WritesText(Protocol):
    """A task whose model writes a text for a text. Its config has the settings of that in a field `decoding`."""

    def problems(self, texts: Sequence[str]) -> list[str | None]:
        """Why each text cannot be given to `write`: "is empty", "has 300 tokens; ..."; None for one that can."""

    def write(self, texts: Sequence[str], predictor: Predictor) -> list[str]:
        """What the model writes for each text."""


def check_texts(task: WritesText, texts: Sequence[str]) -> None:
    """Raise on the first text that cannot be given to `write`."""
    for text, problem in zip(texts, task.problems(texts), strict=True):
        if problem:
            shown = f" {text[:20]!r}{'...' * (len(text) > 20)}" if text.strip() else ""
            raise UserError(f"the text{shown} {problem}")


@runtime_checkable
class ShowsSamples(Protocol):
    """A task whose predictions can be looked at."""

    def samples(self, records: Sequence[Any], predictor: Predictor) -> list[dict[str, str]]:
        """What the model makes of some of these records: named texts, of which the first is its input."""


@runtime_checkable
class GivesAttention(Protocol):
    """A task whose model can be given a text to see what attends to what."""

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """What the model writes for a text, or "", and its attention maps."""
