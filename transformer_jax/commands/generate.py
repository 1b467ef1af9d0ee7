"""`transformer-jax generate RUN < lines > lines`: what a trained model writes for each line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformer_jax.commands.runs import RunCommand, require_ability
from transformer_jax.commands.streams import argument_text
from transformer_jax.data.lines import BYTE_ORDER_MARK
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers
from transformer_jax.tasks import WritesText


@dataclass(frozen=True)
class Generate(RunCommand):
    """Read lines from standard input and write what the model writes for each, one line each, in order.

    A line feed in what the model writes becomes a space. Two texts that belong together, such as a question and a
    passage, have a tab between them.
    """

    prefix: str = ""
    """Text to put before every line, with a space between: for the default data a language, such as "<ja>"."""
    batch_lines: int = 512
    """Number of lines to read before the first is written."""

    def run(self, peers: Peers) -> None:
        """Write what the model makes of standard input to standard output."""
        run = self.open()
        require_ability(run.task, WritesText, "write text")
        model, _ = self.restore(run)
        predictor = run.predictor(model)
        prefix = argument_text("prefix", self.prefix)
        prefix = f"{prefix} " if prefix else ""
        done = 0
        for lines in _shared(peers, _batches(sys.stdin, max(self.batch_lines, 1))):
            texts = [run.config.data.prompt(prefix + line) if line.strip() else "" for line in lines]
            problems = run.task.problems(texts)  # type: ignore[attr-defined]
            good = next((index for index, problem in enumerate(problems) if problem), len(lines))
            with run.precision():
                written = run.task.write(texts[:good], predictor) if good else ()  # type: ignore[attr-defined]
            for text in written:
                print(text.replace("\n", " "))  # a line for a line, whatever the model writes
            sys.stdout.flush()
            if good < len(lines):
                before = "; the lines before it were done" if done + good else ""
                raise UserError(f"line {done + good + 1} {problems[good]}{before}")
            done += len(lines)


def _shared(peers: Peers, batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """The batches that the first of several processes reads, in all of them."""
    while True:
        mine = next(batches, None) if peers.index == 0 else None
        lines = mine if peers.count == 1 else peers.gather(mine)[0]
        if lines is None:
            return
        yield lines


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
