"""`python -m transformer_jax generate WORKDIR < lines > lines`: what a trained model makes of each line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_jax.commands.streams import argument_text
from transformer_jax.data.lines import BYTE_ORDER_MARK
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
        prefix = argument_text("prefix", self.prefix)
        prefix = f"{prefix} " if prefix else ""
        done = 0
        for lines in _batches(sys.stdin, max(self.batch_lines, 1)):
            texts = [run.config.data.prompt(prefix + line) if line.strip() else "" for line in lines]
            faults = run.task.faults(texts)
            good = next((index for index, fault in enumerate(faults) if fault), len(lines))
            with run.precision():
                written = run.task.complete(model, texts[:good], run.strategy) if good else ()
            for text in written:
                print(text.replace("\n", " "))  # a line for a line, whatever the model writes
            sys.stdout.flush()
            if good < len(lines):
                raise UserError(f"line {done + good + 1} {faults[good]}; the lines before it were done")
            done += len(lines)


def _batches(stream: Any, size: int) -> Iterator[list[str]]:
    """So many lines of UTF-8 at a time, and those before one that is not. Lines end at a line feed and nowhere else."""
    if stream is None:
        raise UserError("standard input is closed; give the lines with < FILE")
    lines: list[str] = []
    number, problem = 1, ""
    try:
        for number, line in enumerate(stream.buffer, 1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            lines.append(line.removesuffix(b"\n").removesuffix(b"\r").decode())
            if len(lines) == size:
                yield lines
                lines = []
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line, {error.object[error.start]:#04x}"
        problem = f"line {number}: {byte}, is not UTF-8; convert it to UTF-8; the lines before it were done"
    except OSError as error:
        problem = f"standard input cannot be read: {error.strerror}; give the lines with < FILE"
    if lines:
        yield lines
    if problem:
        raise UserError(problem)
