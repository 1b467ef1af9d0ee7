"""Where numbers stop being finite: the first weight or layer of a model that gives NaN or infinity for a batch."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.layers import is_stacked, map_named_parameters, named_parameters
from transformer_jax.tasks.task import Loss, loss_terms, mean_loss

BLOCKS = ".blocks."
"""What stands between the name of a stack and those of its weights."""


def first_non_finite(loss: Callable[[Any, Any, None], Loss], model: Any, batch: Mapping[str, Any]) -> str:
    """The first place, for people, where the loss of a batch or its gradient is not finite, without dropout.

    A stack is cut after ever more of its layers, with none of those after it: the first layer that makes the loss or
    the gradient infinite or NaN is the one.

    Args:
        loss: of a model and a batch, as a task has it.
        model: whose stacks have weights with a leading axis called "layers".
        batch: that the training stopped at.
    """
    weights = named_parameters(model)
    for name, weight in weights.items():
        if not bool(jnp.all(jnp.isfinite(weight[...]))):
            return f"the weight {name} is not finite"

    @jax.jit
    def is_finite(model: Any, batch: Any) -> jax.Array:
        def objective(model: Any) -> jax.Array:
            return mean_loss(loss_terms(loss(model, batch, None)))["loss"]

        value, gradients = jax.value_and_grad(objective)(model)
        return jnp.isfinite(value) & jnp.isfinite(optax.global_norm(gradients))

    def fails(counts: Mapping[str, int]) -> bool:
        return not bool(is_finite(_first_layers(model, counts), batch))

    depths = {name.partition(BLOCKS)[0]: weight.shape[0] for name, weight in weights.items() if is_stacked(weight)}
    stacks = sorted(depths, key=lambda name: "encoder" not in name)  # which comes before any decoder
    if fails(dict.fromkeys(stacks, 0)):
        return "the embedding or the output layer, without any layer between them"
    for number, stack in enumerate(stacks):
        others = {name: depths[name] for name in stacks[:number]} | dict.fromkeys(stacks[number + 1 :], 0)
        cut = [{**others, stack: count} for count in range(1, depths[stack] + 1)]
        index = bisect_left(cut, True, key=fails)
        if index < len(cut):
            return f"layer {index} of {stack} (of 0 to {depths[stack] - 1})"
    return "nothing: without dropout, the loss and the gradient of this batch are finite now"


def keep_batch(batch: Mapping[str, Any], path: Path) -> None:
    """Write the rows of a batch that this process has to a file that `numpy.load` reads."""
    np.savez(path, **{name: _local_rows(array) for name, array in batch.items()})  # type: ignore[arg-type]


def _local_rows(array: Any) -> np.ndarray:
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def _first_layers(model: Any, counts: Mapping[str, int]) -> Any:
    """The model with only so many layers of each stack."""

    def cut(name: str, leaf: Any) -> Any:
        stack = name.partition(BLOCKS)[0]
        return leaf.replace(leaf[...][: counts[stack]]) if is_stacked(leaf) and stack in counts else leaf

    return map_named_parameters(cut, model)
