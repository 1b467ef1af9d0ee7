"""The compiled programs of a run: what each takes, and a warning when there are more than there should be."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from transformer_jax.parallel.compiled import CompiledStep, Program, Shapes, shapes_of
from transformer_jax.tasks import Task
from transformer_jax.training.progress import ProgressLine
from transformer_jax.training.throughput import step_flops


class Programs:
    """A train step that says what it takes when it is compiled.

    Args:
        step: the step.
        task: whose loss is computed.
        num_shapes: number of shapes that batches come in.
        progress: where it is said.
        dispatching: held while a step takes the state, and not while it is compiled, when another thread may save it.
    """

    def __init__(
        self,
        step: CompiledStep,
        task: Task,
        num_shapes: int,
        progress: ProgressLine,
        dispatching: AbstractContextManager[Any],
    ):
        self._step, self._task, self._num_shapes, self._progress = step, task, num_shapes, progress
        self._dispatching = dispatching
        self._flops: dict[Shapes, float | None] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> tuple[Any, Any, float | None]:
        """The state after a step, its metrics, and its model FLOPs, if they can be counted."""
        shapes, program = shapes_of(batch), self._step.program(state, batch)
        if shapes not in self._flops:
            self._flops[shapes] = step_flops(self._task.loss, state.model, batch)
            self._describe(program, shapes, state)
        with self._dispatching:
            state, metrics = program.run(state, batch)
        return state, metrics, self._flops[shapes]

    def _describe(self, program: Program, shapes: Shapes, state: Any) -> None:
        count = len(self._step.programs)
        if count == 1 and program.memory is not None:
            sizes = {
                "parameters": _bytes_here(state.model),
                "optimizer": _bytes_here(state.optimizer),
                "activations and temporaries": program.memory.temporaries,
            }
            parts = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())
            self._progress.note(f"memory of each device: {parts}; compiled in {program.seconds:.0f} s")
        if count > self._num_shapes:
            self._progress.note(
                f"warning: the step was compiled again, for {_listed(shapes)}; batches should come in "
                f"{self._num_shapes} shapes"
            )


def readable(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _bytes_here(tree: Any) -> int:
    """Bytes of a tree on one device."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes)
