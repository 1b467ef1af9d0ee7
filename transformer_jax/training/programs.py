"""The compiled programs of a run: what each takes, and a warning when there are more than there should be."""

from collections.abc import Mapping
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
        num_parts: how many times a batch the whole batch is, where other processes have other parts of it.
    """

    def __init__(
        self, step: CompiledStep, task: Task, num_shapes: int, progress: ProgressLine, *, num_parts: float = 1.0
    ):
        self._step, self._task, self._num_shapes, self._progress = step, task, num_shapes, progress
        self._num_parts = num_parts
        self._flops: dict[Shapes, float | None] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> tuple[Program, float | None]:
        """The program for a batch, compiled now if it is the first of its shape, and the model FLOPs of the step."""
        shapes, program = shapes_of(batch), self._step.program(state, batch)
        if shapes not in self._flops:
            flops = step_flops(self._task.loss, state.model, batch)
            self._flops[shapes] = None if flops is None else flops * self._num_parts
            self._describe(program, shapes, state)
        return program, self._flops[shapes]

    def _describe(self, program: Program, shapes: Shapes, state: Any) -> None:
        count = len(self._step.programs)
        if count == 1:
            sizes = {"parameters": _bytes_here(state.model), "optimizer": _bytes_here(state.optimizer)}
            if program.memory is not None:
                sizes["activations and temporaries"] = program.memory.temporaries
            parts = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())
            compiled = "" if program.seconds is None else f"; compiled in {program.seconds:.0f} s"
            self._progress.note(f"memory of each device: {parts}{compiled}")
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
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape, _ in shapes)
