"""The train step: one pure function, the same under `jit` on any mesh and under `pmap`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from transformer_jax.parallel import constrain
from transformer_jax.tasks.task import Loss, loss_terms, mean_loss
from transformer_jax.training.state import TrainState

LossFunction = Callable[[Any, Any, Array | None], Loss]
"""(model, batch, one dropout key per row or None) to the loss, as sums and weights."""

TrainStep = Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]


def make_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    axis_name: str | None = None,
    skip_non_finite: bool = False,
) -> TrainStep:
    """`train_step(state, batch) -> (state, metrics)`.

    The gradient is that of the sum of (sum of losses) / (sum of weights) over the terms of the loss, each divided once,
    over all micro-batches and devices: it does not depend on how the batch was divided, however unevenly the padding
    falls. Nor does dropout: each row's noise is a function of (seed, step, slot).

    Args:
        loss: the loss of a batch: a sum and its weight, or several by name.
        optimizer: makes updates of gradients.
        accumulate: number of micro-batches that the batch is computed in, each of them on all devices.
        axis_name: the `pmap` axis to sum over, where there is one.
        skip_non_finite: whether a step whose loss or gradient is not finite changes nothing but its number.

    A batch is a dict of arrays with a leading row axis. Its `slot`, if it has one, is the index of each row in the
    global batch; otherwise rows are counted as they are.
    """

    def train_step(state: TrainState, batch: Mapping[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        step_key = jax.random.fold_in(state.key, state.step)
        if "slot" not in batch:
            batch = {**batch, "slot": _slots(len(jax.tree.leaves(batch)[0]), axis_name)}
        order: list[str] = []  # of the terms, which a dict that went through JAX no longer has

        def terms(model: Any, micro_batch: Mapping[str, Array]):
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, micro_batch["slot"])
            found = loss_terms(loss(model, micro_batch, keys))
            order[:] = found
            return found

        def weights_of(micro_batch: Mapping[str, Array]) -> dict[str, Array]:
            return {name: jnp.float32(term.weight) for name, term in terms(state.model, micro_batch).items()}

        # Each gradient is divided by weights of the whole batch, so these come first. They depend on the batch alone,
        # and XLA drops the rest of this pass, as nothing else of it is read.
        weights = _sum(weights_of, batch, accumulate, axis_name)

        def gradient(micro_batch: Mapping[str, Array]):
            def objective(model: Any):
                found = terms(model, micro_batch)
                shares = {name: term._replace(weight=weights[name]) for name, term in found.items()}
                means = mean_loss(shares)
                return means["loss"], means

            (_, means), gradients = jax.value_and_grad(objective, has_aux=True)(state.model)
            return gradients, means

        gradients, means = _sum(gradient, batch, accumulate, axis_name)
        norm = optax.global_norm(gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        if skip_non_finite:
            is_finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
            model, optimizer_state = jax.tree.map(
                lambda new, old: jnp.where(is_finite, new, old),
                (model, optimizer_state),
                (state.model, state.optimizer),
            )
        metrics = means | {"weight": weights[order[0]], "gradient_norm": norm}
        return replace(state, step=state.step + 1, model=model, optimizer=optimizer_state), metrics

    return train_step


def _slots(num_rows: int, axis_name: str | None) -> Array:
    """The index of each row of a device in the global batch."""
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * num_rows
    return first + jnp.arange(num_rows)


def _sum(function: Callable[[Any], Any], batch: Any, count: int, axis_name: str | None) -> Any:
    """The sum of what a function gives for each micro-batch of each device."""
    if count == 1:
        sums = function(batch)
    else:
        parts = jax.tree.map(lambda x: _micro_batches(x, count), batch)
        shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        sums = jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, function(part)), None), zeros, parts)[0]
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def _micro_batches(x: Array, count: int) -> Array:
    """Rows as [micro-batch, row]: each micro-batch takes every `count`-th row, and so some of every device's."""
    if x.shape[0] % count:
        raise ValueError(f"a batch of {x.shape[0]} rows does not divide into {count} micro-batches")
    parts = jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
    return constrain(parts, None, "batch", *(None,) * (x.ndim - 1))
