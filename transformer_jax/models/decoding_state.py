"""The state of a model while it generates token after token: its key-value cache, and where it is."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.layers import KeyValue


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """All that the next token depends on: the keys and values of each layer, and how many tokens there were."""

    cache: KeyValue
    """Of the tokens so far, with a leading layer axis."""
    position: Int[Array, ""]
    """Number of tokens so far, left padding included."""
    memory: KeyValue | None = None
    """Of the encoder's output, with a leading layer axis, where there is an encoder. No step changes it."""
    source_valid: Bool[Array, "B S"] | None = None
    """Which of the encoder's outputs are not padding, where there is an encoder."""
    row_starts: Int[Array, "B"] | None = None
    """Index of the first token of each row that is not left padding; None for no left padding."""

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int, int],
        dtype: jnp.dtype,
        *,
        memory: KeyValue | None = None,
        source_valid: Bool[Array, "B S"] | None = None,
        row_starts: Int[Array, "B"] | None = None,
    ) -> "DecodingState":
        """An empty cache, with room for keys and values of this shape: [layers, rows, length, heads, head size]."""
        zeros = jnp.zeros(shape, dtype)
        return cls(KeyValue(zeros, zeros), jnp.int32(0), memory, source_valid, row_starts)

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return self.cache.key.shape[2]

    def repeat(self, count: int) -> "DecodingState":
        """Each row `count` times, next to each other."""

        def repeated(tree, axis):
            return jax.tree.map(lambda x: jnp.repeat(x, count, axis=axis), tree)

        return replace(
            self,
            cache=repeated(self.cache, 1),
            memory=repeated(self.memory, 1),
            source_valid=repeated(self.source_valid, 0),
            row_starts=repeated(self.row_starts, 0),
        )

    def reorder(self, rows: Int[Array, "B"]) -> "DecodingState":
        """The state with other rows in place of its own, each of the same source: what comes from the encoder stays."""
        return replace(self, cache=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.cache))
