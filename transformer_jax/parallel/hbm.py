"""How many bytes a compiled program moves between a device and its memory: an estimate, read from the program."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from transformer_jax.parallel.hlo import Computation, Instruction, arrays, computations

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id"),
        *("while", "conditional", "call", "after-all", "copy-done", "slice-done", "async-done", "send-done"),
        *("all-gather-done", "all-reduce-done", "reduce-scatter-done", "collective-permute-done", "recv-done"),
    )
)
"""Instructions that move nothing, or what another has been counted for."""

READS_A_PART = frozenset({"dynamic-slice", "slice", "gather"})


def memory_traffic(text: str) -> int:
    """Bytes that one device reads from and writes to its memory in one run of a program, `compiled.as_text()`.

    Every instruction reads its operands and writes its result, as often as the loops that it is in run; within a fusion
    nothing is written. Of an array of which a slice is read or replaced, the slice is counted. What the program keeps
    in the memory within a TPU is left out. This is an estimate: it knows nothing of caches, nor of what a kernel reads
    twice. XLA's own `bytes accessed` counts a loop once.
    """
    program = computations(text)
    inner = {name for computation in program.values() for name in _inner(computation)}
    return sum(
        computation.runs * sum(_traffic(instruction, computation, program) for instruction in instructions)
        for computation in program.values()
        if computation.runs and computation.name not in inner
        for instructions in [computation.instructions.values()]
    )


def _inner(computation: Computation) -> list[str]:
    """The computations that are parts of instructions of this one: fusions, and what reductions apply."""
    return [
        name
        for line in computation.lines
        if " fusion(" in line or "to_apply=" in line
        for name in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
    ]


def _traffic(instruction: Instruction, computation: Computation, program: Mapping[str, Computation]) -> int:
    shapes = [computation.instructions[name].shape for name in instruction.operands if name in computation.instructions]
    if instruction.opcode in FREE or 'custom_call_target="AllocateBuffer"' in instruction.line:
        return 0
    if instruction.opcode in READS_A_PART:
        return 2 * _size(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _size(shapes[1])
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("("):
        return _size(instruction.shape)  # which has the operand beside the result
    if instruction.opcode == "fusion":
        found = [_through_fusion(number, instruction, program) for number in range(len(instruction.operands))]
        kept = sum(part.kept for part in found)
        return sum(part.read for part in found) + max(_size(instruction.shape) - kept, 0)
    return _size(instruction.shape) + sum(map(_size, shapes))


class _Part(NamedTuple):
    """What becomes of an operand of a fusion, in bytes."""

    read: int
    kept: int
    """Of the fusion's result, what is the operand itself, in the same place."""


def _through_fusion(number: int, fusion: Instruction, program: Mapping[str, Computation]) -> _Part:
    """What is read of an operand: the slices, if nothing else; and what is not written, since it stays as it was."""
    inside = _called(fusion, program)
    parameter = next((one for one in inside.values() if f" parameter({number})" in one.line), None)
    return _Part(0, 0) if parameter is None else _uses(parameter, inside, program)


def _uses(value: Instruction, inside: Mapping[str, Instruction], program: Mapping[str, Computation]) -> _Part:
    whole, read, kept = _size(value.shape), 0, 0
    for use in inside.values():
        if value.name not in use.operands:
            continue
        is_first = use.operands[0] == value.name
        part = _Part(whole, 0)
        if use.opcode in READS_A_PART and is_first:
            part = _Part(_size(use.shape), 0)
        elif use.opcode == "dynamic-update-slice" and is_first:
            part = _Part(0, _size(use.shape) - _size(inside[use.operands[1]].shape))
        elif _is_bitcast(use, program):
            part = _uses(use, inside, program) if not use.line.lstrip().startswith("ROOT ") else part
        elif use.opcode == "fusion":
            part = _through_fusion(use.operands.index(value.name), use, program)
        read, kept = read + part.read, kept + part.kept
    return _Part(min(read, whole), kept)


def _is_bitcast(instruction: Instruction, program: Mapping[str, Computation]) -> bool:
    """Whether an instruction only gives its operand another shape; the TPU compiler makes fusions of such."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "bitcast"
    return {one.opcode for one in _called(instruction, program).values()} == {"parameter", "bitcast"}


def _called(fusion: Instruction, program: Mapping[str, Computation]) -> Mapping[str, Instruction]:
    return program[re.search(r"calls=%?([\w.\-]+)", fusion.line)[1]].instructions  # type: ignore[index]


def _size(shape: str) -> int:
    return sum(array.num_bytes for array in arrays(shape) if array.memory_space == 0)
