"""`transformer-jax checkpoints {list,average} RUN`: what a run has kept, and the mean of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from transformer_jax.commands.runs import open_run
from transformer_jax.errors import UserError
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.run import write_run


@dataclass(frozen=True)
class List:
    """Print the steps of which there is a checkpoint, one a line."""

    workdir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Print the steps."""
        with open_run(self.workdir, self.config).checkpoints() as checkpoints:
            print("\n".join(map(str, checkpoints.steps())))


@dataclass(frozen=True)
class Average:
    """Make a new run of which the model is the mean of a run's checkpoints (Vaswani et al. 2017, section 6.1)."""

    workdir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the new run, for evaluate, generate, attention and to start other runs from."""
    last: int = 5
    """Number of the newest checkpoints to take; a run keeps as many as its setting keep says."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Write the new run and print which steps it is the mean of."""
        if self.last < 1:
            raise UserError(f"last must be at least 1; got {self.last}")
        if self.out.exists():
            raise UserError(f"{self.out} exists already; give another folder")
        run = open_run(self.workdir, self.config)
        with run.checkpoints() as checkpoints:
            steps = checkpoints.steps()[-self.last :]
            model = _mean(checkpoints, run.abstract_model(), steps)
        write_run(self.out, run.config, run.processor, model, steps[-1])
        if len(steps) < self.last:
            print(f"note: there are only {len(steps)} checkpoints; train with --keep {self.last} to have more")
        print(f"{self.out} is the mean of the steps {', '.join(map(str, steps))}")


def _mean(checkpoints: Checkpoints, like: Any, steps: list[int]) -> Any:
    """The mean of the parameters of these steps, which are read one at a time."""
    total = None
    for step in steps:
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), checkpoints.restore_model(like, step))
        total = wide if total is None else jax.tree.map(np.add, total, wide)
    return jax.tree.map(lambda x, leaf: jax.numpy.asarray(x / len(steps), leaf.dtype), total, like)
