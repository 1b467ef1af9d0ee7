"""The train step of a config with shapes and shardings in place of arrays, for devices that need not be there."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from transformer_jax.data.batches import Batch
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy, partition
from transformer_jax.parallel.flops import matmul_flops, train_flops
from transformer_jax.tasks.task import Loss
from transformer_jax.training.config import Config
from transformer_jax.training.run import Run
from transformer_jax.training.stand_in import StandIn
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import make_train_step
from transformer_jax.training.workdir import Workdir


@dataclass(frozen=True)
class AbstractStep:
    """A train step that can be compiled, and not run."""

    run: Run
    state: TrainState
    """Abstract, with the sharding of each array."""
    batch: dict[str, Any]
    """The largest global batch, abstract as well."""
    assumptions: tuple[str, ...]
    """What was taken for granted, since no data were read."""

    @classmethod
    def of(cls, config: Config, devices: Sequence[jax.Device], dtype: str) -> "AbstractStep":
        """The step on the largest batch that the run would compile it for."""
        if config.strategy != "jit":
            raise UserError(f"strategy={config.strategy} cannot be compiled ahead of time; leave it at jit")
        stand_in = StandIn.of(config, dtype)
        config = stand_in.config
        strategy = Strategy.choose("jit", config.mesh, config.rules, list(devices))
        task = config.task.build(stand_in.processor, config.model, config.batching)
        optimizer = config.optimizer.build(getattr(config.model, "d_model", None))
        run = Run(Workdir(Path()), config, stand_in.processor, task, optimizer, strategy)
        state = jax.eval_shape(run.initial_state)
        state = jax.tree.map(_sharded, state, strategy.shardings(state))
        batches = stand_in.batches(task, strategy.num_row_shards * config.accumulate)
        if len(batches) > 1:
            batches.sort(key=lambda batch: matmul_flops(cls._forward(run), state.model, _abstract(batch)))
        rows = NamedSharding(strategy.mesh, partition(("batch",), strategy.mesh.axis_names, strategy.rules))
        batch = {name: _sharded(array, rows) for name, array in _abstract(batches[-1]).items()}
        return cls(run, state, batch, stand_in.assumptions)

    def compile(self) -> jax.stages.Compiled:
        """What `Strategy.compile` compiles in the training loop."""
        strategy = self.run.strategy
        outputs = (jax.tree.map(lambda x: x.sharding, self.state), strategy.replicated)
        step = strategy.jit(self._function(), donate_argnums=0, out_shardings=outputs)
        with self.run.precision():
            return step.lower(self.state, self.batch).compile()

    def flops(self) -> tuple[int, int]:
        """The model FLOPs of a step, and those of all matrix products in it."""
        forward = train_flops(self._forward(self.run), self.state.model, self.batch)
        with self.run.strategy.context():
            everything = matmul_flops(self._function(), self.state, self.batch)
        # The pass that only counts the weights of the loss is dropped by the compiler.
        return forward, everything - forward // 3

    def _function(self) -> Any:
        run = self.run

        def loss(model: Any, batch: Any, key: Any) -> Loss:
            return run.task.loss(run.config.optimizer.without_frozen_gradients(model), batch, key)

        return make_train_step(loss, run.optimizer, accumulate=run.config.accumulate)

    @staticmethod
    def _forward(run: Run) -> Any:
        return lambda model, batch: run.task.loss(model, batch, None)


def _sharded(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _abstract(batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}
