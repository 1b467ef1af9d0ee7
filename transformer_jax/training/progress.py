"""The live line of a run: how far, how well, how fast, how long to go."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

SECONDS_BETWEEN_LINES = 15.0
T = TypeVar("T")


class ProgressLine:
    """A bar on a terminal; elsewhere, a line now and then. Everything goes to standard error."""

    def __init__(
        self,
        total: int,
        done: int,
        unit: str = "tokens",
        *,
        seconds_between_lines: float = SECONDS_BETWEEN_LINES,
        quiet: bool = False,
    ):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self._total, self._unit = total, unit
        self._interval, self._printed = seconds_between_lines, time.monotonic()
        self._updated, self._durations = time.monotonic(), deque[float](maxlen=100)
        self._bar = Progress(
            TextColumn("step {task.completed:,.0f} of {task.total:,.0f}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, metrics="starting")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, units_per_second: float) -> None:
        """Show the metrics of the newest step. The time left goes by the median step, which knows no compiling."""
        now = time.monotonic()
        self._durations.append(now - self._updated)
        self._updated = now
        left = _duration((self._total - step) * statistics.median(self._durations))
        metrics = f"loss {loss:.4f}  {units_per_second:,.0f} {self._unit}/s"
        metrics += f"  {left} left" if len(self._durations) > 5 else ""
        self._bar.update(self._task, completed=step, metrics=metrics)
        self._note_now_and_then(f"step {step:,} of {self._total:,}  {metrics}")

    @contextmanager
    def subtask(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """While inside, say what is being done besides training; call what it gives with the rows that are done."""
        done = 0

        def tick(num_rows: int) -> None:
            nonlocal done
            done += num_rows
            self._bar.update(self._task, metrics=f"{what}: {done:,} of {total:,}")
            self._note_now_and_then(f"{what}: {done:,} of {total:,}")

        yield tick

    def _note_now_and_then(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._printed >= self._interval:
            self._printed = time.monotonic()
            self.note(text)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)
        sys.stderr.flush()


def watch(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with a bar on a terminal while they are gone through, and elsewhere a line if it takes long."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    printed = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for done, item in enumerate(bar.track(items, description=what)):
            if not console.is_terminal and time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
                printed = time.monotonic()
                console.print(f"{what}: {done / len(items):.0%}", markup=False)
            yield item


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
