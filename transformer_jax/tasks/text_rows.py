"""Tasks on rows of one or two texts between special tokens, as encoders read them: [CLS] a [SEP] b [SEP]."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.data.columns import Column, token_column
from transformer_jax.data.rows import BatchingConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.models import GPT
from transformer_jax.tasks.abilities import AttentionMap, attention_map
from transformer_jax.tasks.predictor import Predictor
from transformer_jax.tasks.task import Task


@dataclass(frozen=True)
class TextRowTask(Task):
    """A row for each example, which a head of the model says something of."""

    config: Any
    tokenizer: Tokenizer
    batching: BatchingConfig
    max_length: int
    """Most tokens of a row."""
    is_causal: bool = False
    """Whether the model reads from left to right: then a row is bare text, and its last token sees all of it."""

    def __post_init__(self):
        if self.batching.pack_length is not None:
            raise UserError(
                f"batching.pack_length={self.batching.pack_length}, but {type(self).__name__} has an example to a row; "
                "set it to None"
            )

    @property
    def row_columns(self) -> dict[str, Column]:
        """The ids of a row, and which of the two texts each belongs to."""
        return {
            "ids": token_column(self.tokenizer.vocab_size, self.tokenizer.pad_id),
            "types": Column(limits=(0, 1)),
        }

    @property
    def max_lengths(self) -> dict[str, int]:
        """Longer rows are cut."""
        return {name: self.max_length for name, column in self.columns.items() if column.ragged}

    def room(self, num_texts: int = 1) -> int:
        """Number of tokens of text that fit into a row beside its special tokens."""
        return self.max_length - (num_texts - 1 if self.is_causal else num_texts + 1)

    def row(self, first: Sequence[int], second: Sequence[int] | None = None) -> dict[str, list[int]]:
        """The columns of one text, or of two. What is too long is cut, of two texts the longer one first."""
        begin, end = [self.tokenizer.begin_id], [self.tokenizer.end_id]
        if second is None:
            ids = [*first][: self.room()]
            ids = ids or end if self.is_causal else [*begin, *ids, *end]
            return {"ids": ids, "types": [0] * len(ids)}
        half, room = self.room(2) // 2, self.room(2)
        first = first[: max(room - half, room - len(second))]
        second = second[: room - len(first)]
        left, right = ([*first, *end], [*second]) if self.is_causal else ([*begin, *first, *end], [*second, *end])
        return {"ids": left + right, "types": [0] * len(left) + [1] * len(right)}

    @abstractmethod
    def record(self, text: str) -> dict[str, str]:
        """The record of a line that `write` is given."""

    def hidden(self, model: Any, batch: Mapping[str, Array], key: Array | None = None) -> Float[Array, "B T D"]:
        """A vector for each token of a batch of rows."""
        valid = batch["ids_segments"] > 0
        if isinstance(model, GPT):
            return model.hidden(batch["ids"], valid=valid, dropout_key=key)
        return model(batch["ids"], _types(model, batch), valid=valid, dropout_key=key)

    def attention(self, text: str, predictor: Predictor) -> tuple[str, list[AttentionMap]]:
        """What the model says of a text, or of two with a tab between, and what their tokens attend to."""
        (written,) = self.write([text], predictor)  # type: ignore[attr-defined]
        (example,) = self.encode([self.record(text)])
        row = {name: example[name] for name in self.row_columns}
        room = {"max_length": self.max_length, "batch_rows": 1}
        found = predictor.over(TextRowTask._attention, [row], self.row_columns, **room)
        tokens = self.tokenizer.tokens(row["ids"])
        return written, [attention_map("decoder" if self.is_causal else "encoder", found["weights"][0], tokens, tokens)]

    def _attention(self, model: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
        valid = batch["ids_segments"] > 0
        if isinstance(model, GPT):
            return {"weights": jnp.moveaxis(model.attention(batch["ids"], valid=valid), 1, 0)}
        return {"weights": jnp.moveaxis(model.attention(batch["ids"], _types(model, batch), valid=valid), 1, 0)}


def _types(model: Any, batch: Mapping[str, Array]) -> Array | None:
    return batch["types"] if model.config.num_types > 1 else None
