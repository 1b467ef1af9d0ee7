"""`python -m transformer_jax checkpoints {list,average} WORKDIR`: what a run has kept, and the mean of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from transformer_jax.errors import UserError
from transformer_jax.training import Run
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.run import write_run
from transformer_jax.training.state import TrainState


@dataclass(frozen=True)
class List:
    """Print the steps of which there is a checkpoint, one a line."""

    workdir: Annotated[Path, tyro.conf.Positional]
    """The folder of the run."""

    def run(self) -> None:
        """Print the steps."""
        with Run.open(self.workdir).checkpoints() as checkpoints:
            print("\n".join(map(str, checkpoints.steps())))


@dataclass(frozen=True)
class Average:
    """Make a new run of which the model is the mean of a run's checkpoints (Vaswani et al. 2017, section 6.1)."""

    workdir: Annotated[Path, tyro.conf.Positional]
    """The folder of the run."""
    out: Annotated[Path, tyro.conf.Positional]
    """The folder of the new run, for evaluate, generate and attention."""
    last: int = 5
    """Number of the newest checkpoints to take; a run keeps as many as its `keep` says."""

    def run(self) -> None:
        """Write the new run and print which steps it is the mean of."""
        if self.last < 1:
            raise UserError(f"last must be at least 1; got {self.last}")
        if self.out.exists():
            raise UserError(f"{self.out} exists already; give another folder")
        run = Run.open(self.workdir)
        with run.checkpoints() as checkpoints:
            steps = checkpoints.steps()[-self.last :]
            state = _mean(checkpoints, jax.eval_shape(run.initial_state), steps)
        write_run(self.out, run.config, run.task.tokenizer, state)
        if len(steps) < self.last:
            print(f"note: there are only {len(steps)} checkpoints; train with --keep {self.last} to have more")
        print(f"{self.out} is the mean of the steps {', '.join(map(str, steps))}")


def _mean(checkpoints: Checkpoints, like: TrainState, steps: list[int]) -> TrainState:
    """The newest of these states, with the mean of their models, which are read one at a time."""
    total = None
    for step in steps:
        state = checkpoints.restore(like, step)
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), state.model)
        total = wide if total is None else jax.tree.map(np.add, total, wide)
    model = jax.tree.map(lambda x, leaf: jax.numpy.asarray(x / len(steps), leaf.dtype), total, like.model)
    return replace(state, model=model)
