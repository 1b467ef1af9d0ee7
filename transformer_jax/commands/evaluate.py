"""`transformer-jax evaluate RUN`: how well a trained model does."""

import json
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from transformer_jax.commands.runs import RunCommand
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers
from transformer_jax.tasks.predictor import num_rows
from transformer_jax.training.examples import encode_split


@dataclass(frozen=True)
class Evaluate(RunCommand):
    """Evaluate a trained model on a split of its data, or of the data that the flags name; prints one JSON object."""

    split: Literal["train", "valid", "test"] = "test"
    """Split of the data to evaluate on."""
    examples: int | None = None
    """Most examples to evaluate on, evenly spaced, or rows of a language model's text; None takes all."""

    def run(self, peers: Peers) -> None:
        """Print the metrics."""
        if self.examples is not None and self.examples < 1:
            raise UserError(f"examples must be at least 1; got {self.examples}")
        run = self.open()
        encoded = encode_split(run.config, run.task, self.split, self.examples)
        if not len(encoded.records):
            raise UserError(
                f"the {self.split} split of {self.workdir} is empty; give another --split, or data with "
                f"--data.{self.split}"
            )
        model, step = self.restore(run)
        console = Console(stderr=True)
        with (
            Progress(console=console, transient=True, disable=not console.is_terminal or peers.index > 0) as progress,
            run.precision(),
        ):
            total = num_rows(run.task.layout(encoded.examples, training=False), self.examples)
            bar = progress.add_task(f"{self.split} split", total=total)
            predictor = run.predictor(model, tick=lambda rows: progress.advance(bar, rows))
            metrics = predictor.evaluate(encoded.records, examples=encoded.examples, limit=self.examples)
        print(json.dumps({"step": step, "split": self.split, "examples": len(encoded.records), **metrics}))
