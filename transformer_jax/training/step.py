"""The train step: one pure function, the same under `jit` on one device and under `pmap` on several."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from transformer_jax.training.state import TrainState

Batch = Mapping[str, Array]
"""Arrays with a leading batch axis; `slot` is each row's place in the whole batch over all devices."""

Sums = tuple[Float[Array, ""], Float[Array, ""]]
"""A sum and the weight to divide it by, once all of them are added up."""

Loss = Callable[[Any, Batch, Array | None], Sums]
"""(model, batch, one dropout key per row or None) to the loss."""

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, *, accumulate: int = 1, axis_name: str | None = None
) -> TrainStep:
    """`train_step(state, batch) -> (state, metrics)`.

    The gradient is that of (sum of losses) / (sum of weights) over all micro-batches and devices: it does not depend
    on how the batch was divided, however unevenly the padding falls. Nor does dropout: each row's noise is a function
    of (seed, step, slot).

    Args:
        loss: the loss of a batch.
        optimizer: makes updates of gradients.
        accumulate: number of micro-batches that a device's share of the batch is computed in.
        axis_name: the `pmap` axis to sum over, where there is one.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        step_key = jax.random.fold_in(state.key, state.step)

        def gradient(micro_batch: Batch):
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, micro_batch["slot"])
            differentiate = jax.value_and_grad(lambda model: loss(model, micro_batch, keys), has_aux=True)
            (total, weight), gradients = differentiate(state.model)
            return gradients, total, weight

        sums = _sum_over_micro_batches(gradient, batch, accumulate)
        gradients, total, weight = sums if axis_name is None else jax.lax.psum(sums, axis_name)
        share = 1 / jnp.where(weight == 0, 1, weight)
        gradients = jax.tree.map(lambda g: g * share, gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        metrics = {"loss": total * share, "tokens": weight, "gradient_norm": optax.global_norm(gradients)}
        return replace(state, step=state.step + 1, model=model, optimizer=optimizer_state), metrics

    return train_step


def _sum_over_micro_batches(gradient: Callable[[Batch], Any], batch: Batch, count: int) -> Any:
    if count == 1:
        return gradient(batch)
    parts = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, gradient(part)), None), zeros, parts)[0]
