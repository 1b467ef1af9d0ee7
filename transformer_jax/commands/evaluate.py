"""`python -m transformer_jax evaluate WORKDIR`: how well a trained model does."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import Progress

from transformer_jax.errors import UserError
from transformer_jax.training import Run


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained model on a split of its data; prints one JSON object."""

    workdir: Annotated[Path, tyro.conf.Positional]
    """The folder of the run."""
    split: Literal["valid", "test"] = "test"
    """The part of the data to evaluate on."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""
    num_beams: int | None = None
    """Hypotheses of the beam search, 1 for greedy; as in training by default."""

    def run(self) -> None:
        """Print the figures."""
        run = Run.open(self.workdir).with_task(num_beams=self.num_beams)
        model, step = run.restored_model(self.step)
        records = run.config.data.split(self.split)
        if not len(records):
            raise UserError(f"the {self.split} split of {self.workdir} is empty")
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress, run.precision():
            bar = progress.add_task(f"{self.split} split", total=len(records))
            figures = run.task.evaluate(model, records, run.strategy, tick=lambda done: progress.advance(bar, done))
        print(json.dumps({"step": step, "split": self.split, "examples": len(records), **figures}))
