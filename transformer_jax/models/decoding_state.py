"""What a model remembers while it writes token after token."""

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
    memory: KeyValue | None = None
    """Of the encoder's output, with a leading layer axis, where there is an encoder. No step changes it."""
    source_valid: Bool[Array, "B S"] | None = None
    """Which of the encoder's outputs are not padding, where there is an encoder."""
    begins: Int[Array, "B"] | None = None
    """Where the text of each row begins, where not all begin at the first place: prompts padded on the left."""

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int, int],
        dtype: jnp.dtype,
        *,
        memory: KeyValue | None = None,
        source_valid: Bool[Array, "B S"] | None = None,
        begins: Int[Array, "B"] | None = None,
    ) -> "DecodingState":
        """Nothing written yet, and room for keys and values of this shape: [layers, rows, length, heads, head size]."""
        zeros = jnp.zeros(shape, dtype)
        return cls(KeyValue(zeros, zeros), jnp.int32(0), memory, source_valid, begins)

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
            begins=repeated(self.begins, 0),
        )

    def reorder(self, rows: Int[Array, "B"]) -> "DecodingState":
        """Go on from other rows, each one of the same source: what comes from the encoder stays in place."""
        return replace(self, cache=jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self.cache))
