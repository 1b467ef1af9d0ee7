"""Linear maps with named axes, and embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from transformer_jax.functional import embed, linear
from transformer_jax.functional.linear import wide_einsum
from transformer_jax.layers.parameter import (
    Axes,
    Initializer,
    LinearInitializer,
    glorot_uniform,
    normal,
    parameter,
    zeros,
)
from transformer_jax.parallel.axes import constrain


class Linear(nnx.Module):
    """xW + b from some named axes to others: `Linear({"embed": 512}, {"heads": 8, "head": 64}, rngs=rngs)`."""

    def __init__(
        self,
        inputs: Axes,
        outputs: Axes,
        *,
        bias: bool = True,
        initializer: LinearInitializer = glorot_uniform,
        rngs: nnx.Rngs,
    ):
        for axis in inputs.keys() & outputs.keys():
            raise ValueError(f"the axis {axis!r} is an input and an output; give one of them another name")
        num_inputs = len(inputs)
        self.weight = parameter(rngs, inputs | outputs, initializer(num_inputs), decay=True, num_inputs=num_inputs)
        self.bias = parameter(rngs, outputs, zeros, decay=False) if bias else None

    def arrays(self) -> tuple[Array, Array | None]:
        """The weight and the bias."""
        return self.weight[...], None if self.bias is None else self.bias[...]

    def __call__(self, x: Float[Array, "..."], *, dtype: jnp.dtype | None = None) -> Array:
        """xW + b, added up in the dtype of x, or in another."""
        return linear(x, *self.arrays(), num_inputs=self.weight.num_inputs, dtype=dtype)


class Embedding(nnx.Module):
    """A vector for each id, by default with standard deviation 1 / sqrt(d_model); also an output layer."""

    def __init__(
        self,
        num_ids: int,
        d_model: int,
        *,
        axis: str = "vocab",
        decay: bool = True,
        initializer: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.table = parameter(
            rngs, {axis: num_ids, "embed": d_model}, initializer or normal(d_model**-0.5), decay=decay
        )

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        check_ids(ids, self.table.shape[0], self.table.axes[0])
        # Rows in one piece: looked up in pieces, the compiler would put the whole result together on every device.
        return embed(constrain(self.table[...], self.table.axes[0], None), ids)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The score of each id, in float32: xE^T."""
        return wide_einsum("BTD,VD->BTV", x, self.table[...].astype(x.dtype))


def position_indices(length: int) -> Int[Array, "T"]:
    """0, 1, ..., length - 1: concrete under a trace too, so that one outside of a table is an error there as well."""
    return np.arange(length, dtype=np.int32)  # type: ignore[return-value]


def check_ids(ids: Int[Array, "..."], num_ids: int, axis: str = "vocab") -> None:
    """Raise on an id outside 0..num_ids-1. Under a trace the ids are not known: there such an id becomes NaN."""
    if isinstance(ids, jax.core.Tracer) or ids.size == 0:
        return
    known = np.asarray(ids)
    low, high = known.min(), known.max()
    if low < 0 or high >= num_ids:
        name, table = ("id", "vocabulary") if axis == "vocab" else (axis, "table")
        wrong = low if low < 0 else high
        raise ValueError(f"{name} {wrong} is outside the {table} of {num_ids} ({name}s 0 to {num_ids - 1})")
