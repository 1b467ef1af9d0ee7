"""What the benchmarks share: turns in one run, the other side in a process of its own, ratios of neighbouring turns."""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

WARM_UP = 3  # turns of each that are not counted
OURS = "transformer_jax"


def seconds(function: Callable[[], None]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_process(worker: Callable[..., None], *arguments: Any) -> Callable[[], float]:
    """A function that has another process make one step and returns its seconds; the worker ends with `answer`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=worker, args=(theirs, *arguments), daemon=True).start()

    def run() -> float:
        ours.send(True)
        return ours.recv()

    return run


def answer(connection: Connection, run: Callable[[], None]) -> None:
    """Make a step and send its seconds, for each message."""
    with contextlib.suppress(EOFError):  # the other end is gone: all turns are taken
        while connection.recv():
            connection.send(seconds(run))


def take_turns(runners: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each runner in each round."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(WARM_UP + rounds):
        for name, run in runners.items():
            spent = run()
            if turn >= WARM_UP:
                times[name].append(spent)
            time.sleep(0.02)  # until the other's threads have stopped to spin
    return times


def print_ratio(times: Mapping[str, list[float]], name: str) -> None:
    """How much faster we are than another, turn by turn."""
    ratios = sorted(theirs / ours for theirs, ours in zip(times[name], times[OURS], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    middle = statistics.median(ratios)
    print(f"speed relative to {name}: {middle:.2f} (middle half of the turns: {low:.2f} to {high:.2f})")
