"""A few steps of a config, computed in any way: what is compared when the law of parallelism is verified."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.data import Batches, Store
from transformer_jax.data.source import FirstRecords
from transformer_jax.errors import UserError
from transformer_jax.layers import named_parameters
from transformer_jax.parallel import Strategy
from transformer_jax.training.config import Config
from transformer_jax.training.examples import records_of
from transformer_jax.training.resolve import resolve_new
from transformer_jax.training.run import Run
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import make_train_step
from transformer_jax.training.workdir import Workdir

NUM_RECORDS = 512  # that batches are made of
DROPOUT_RATE = 0.1  # where a config has none: the law is about dropout, too


class Outcome(NamedTuple):
    """What a few steps gave: the loss of each, and the gradients of the first."""

    losses: list[float]
    gradients: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trial:
    """A run in a temporary folder, and the batches of its first steps."""

    run: Run
    steps: int
    batches: list[dict[str, np.ndarray]]
    examples: Store

    @classmethod
    def of(cls, config: Config, folder: Path, steps: int, multiple: int) -> "Trial":
        model = config.model
        if model is None:
            raise UserError("init_from decides the model; give a config with a model to verify")
        rates = [field.name for field in fields(model) if field.name.endswith("dropout_rate")]
        noisy = {name: getattr(model, name) or DROPOUT_RATE for name in rates}
        precise = {"dtype": "float32"} if hasattr(model, "dtype") else {}
        config = replace(
            config,
            model=replace(model, **noisy, **precise),
            data=FirstRecords(config.data, NUM_RECORDS),
            init_from=None,
            matmul_precision=None,
            workdir=folder / "run",
        )
        resolved, processor = resolve_new(config, None)
        run = Run._assemble(Workdir.of(config), replace(resolved, data=config.data), processor)
        records = records_of(config, "train")
        examples = Store.of(run.task.encode([records[i] for i in range(len(records))]), run.task.columns)
        batches = Batches(run.task.layout(examples, training=True), seed=config.seed, multiple=multiple)
        return cls(run, steps, [batches[number] for number in range(steps)], examples)

    def states(self, strategy: Strategy, accumulate: int = 1) -> Iterator[tuple[TrainState, float]]:
        """The state before the first step and after each, with its loss. The optimizer keeps the last gradients."""
        run = replace(self.run, strategy=strategy, optimizer=optax.chain(_keep_gradients(), self.run.optimizer))
        yield from self.steps_from(run, run.first_state()[0], accumulate)

    def steps_from(
        self, run: Run, state: TrainState, accumulate: int = 1, first: int = 0
    ) -> Iterator[tuple[TrainState, float]]:
        strategy, task, freezing = run.strategy, run.task, run.config.optimizer

        def loss(model: Any, batch: Any, key: Any) -> Any:
            return task.loss(freezing.without_frozen_gradients(model), batch, key)

        step = make_train_step(loss, run.optimizer, accumulate=accumulate, axis_name=strategy.axis_name)
        compiled = strategy.compile(step, state)
        yield state, float("nan")
        for batch in strategy.feed(iter(self.batches[first:])):
            state, metrics = compiled(state, batch)
            yield state, float(metrics["loss"])

    def outcome(self, strategy: Strategy, accumulate: int = 1) -> Outcome:
        losses, gradients = [], {}
        for number, (state, loss) in enumerate(self.states(strategy, accumulate)):
            if number == 1:
                gradients = {name: np.asarray(leaf[...]) for name, leaf in named_parameters(state.optimizer[0]).items()}
            losses.append(loss)
        return Outcome(losses[1:], gradients)


def _keep_gradients() -> optax.GradientTransformation:
    """A link of a chain that changes nothing, and whose state is the gradients."""

    def zeros(parameters: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, parameters)

    return optax.GradientTransformation(zeros, lambda gradients, _, __=None: (gradients, gradients))
