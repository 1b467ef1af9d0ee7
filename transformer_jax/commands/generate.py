"""`python -m transformer_jax generate WORKDIR < lines > lines`: what a trained model makes of each line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_jax.errors import UserError
from transformer_jax.training import Run


@dataclass(frozen=True)
class Generate:
    """Read lines from standard input and write the model's output for each, one line each, in order."""

    workdir: Annotated[Path, tyro.conf.Positional]
    """The folder of the run."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""
    num_beams: int | None = None
    """Hypotheses of the beam search, 1 for greedy; as in training by default."""
    new_tokens: int | None = None
    """Most tokens that a language model writes after a line; as in training by default, here and below."""
    temperature: float | None = None
    """Divides the logits that tokens are drawn by; 0 takes the likeliest."""
    top_k: int | None = None
    """Draw only among this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw only among the likeliest tokens that have this much probability together."""
    seed: int | None = None
    """Of what is drawn."""
    prefix: str = ""
    """Put before every line, with a space between: for the default data a language, such as "<ja>"."""
    batch_lines: int = 512
    """Lines to read before writing."""

    def run(self) -> None:
        """Complete standard input to standard output."""
        run = Run.open(self.workdir).with_task(
            num_beams=self.num_beams,
            new_tokens=self.new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )
        model, _ = run.restored_model(self.step)
        lines = _numbered(sys.stdin)
        prefix = f"{self.prefix} " if self.prefix else ""
        while batch := list(islice(lines, max(self.batch_lines, 1))):
            texts = [run.config.data.prompt(prefix + line) if line.strip() else "" for _, line in batch]
            faults = run.task.faults(texts)
            good = next((place for place, fault in enumerate(faults) if fault), len(batch))
            for text in run.task.complete(model, texts[:good], run.strategy) if good else ():
                print(text.replace("\n", " "))  # a line for a line, whatever the model writes
            sys.stdout.flush()
            if good < len(batch):
                raise UserError(f"line {batch[good][0]} {faults[good]}; the lines before it were done")


def _numbered(stream: Any) -> Iterator[tuple[int, str]]:
    """Lines end at a line feed and nowhere else."""
    stream.reconfigure(encoding="utf-8", newline="\n")
    for number, line in enumerate(stream, 1):
        yield number, line.removesuffix("\n").removesuffix("\r")
