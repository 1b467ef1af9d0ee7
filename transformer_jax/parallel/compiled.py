"""Functions that are compiled for a mesh, and what their programs take."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from transformer_jax.parallel.topology import MemoryUse, memory

Shapes = tuple[tuple[str, tuple[int, ...], Any], ...]
"""The name, the shape and the dtype of each array of a batch."""


def shapes_of(batch: Mapping[str, Any]) -> Shapes:
    """The shapes of a batch, which a step is compiled for."""
    return tuple((name, array.shape, array.dtype) for name, array in batch.items())


@dataclass(frozen=True)
class Compiled:
    """A function under `jax.jit`, called inside a context that sets its mesh."""

    function: Any
    context: Callable[[], AbstractContextManager[None]]

    def __call__(self, *arguments: Any) -> Any:
        with self.context():
            return self.function(*arguments)

    def lower(self, *arguments: Any) -> Any:
        """The function lowered for these arguments, which may be abstract, to be compiled ahead of time."""
        with self.context():
            return self.function.lower(*arguments)


@dataclass(frozen=True)
class Program:
    """A step compiled for one shape of a batch."""

    run: Callable[[Any, Any], Any]
    seconds: float | None
    """How long it took to compile; None where that happens in the first call."""
    memory: MemoryUse | None
    """What it takes on each device; None where the compiler does not say."""


class CompiledStep:
    """A step `(state, batch) -> (state, metrics)`, compiled once for each shape of a batch."""

    def __init__(self, step: Callable[[Any, Any], Any]):
        self._step = step
        self.programs: dict[Shapes, Program] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        return self.program(state, batch).run(state, batch)

    def program(self, state: Any, batch: Mapping[str, Any]) -> Program:
        """The program for batches of this shape, compiled now if it is the first."""
        shapes = shapes_of(batch)
        if shapes not in self.programs:
            self.programs[shapes] = self._compile(state, batch)
        return self.programs[shapes]

    def _compile(self, state: Any, batch: Mapping[str, Any]) -> Program:
        if not isinstance(self._step, Compiled):
            return Program(self._step, None, None)
        begin = time.monotonic()
        compiled = self._step.lower(state, batch).compile()
        return Program(compiled, time.monotonic() - begin, _memory(compiled))


def _memory(compiled: Any) -> MemoryUse | None:
    try:
        return memory(compiled)
    except ValueError:
        return None
