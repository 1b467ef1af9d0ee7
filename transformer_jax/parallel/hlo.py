"""A compiled program as XLA writes it: its computations, their instructions, and how often each of them runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of a computation: `%name = shape opcode(%operand, ...), attributes`."""

    name: str
    shape: str
    """Of what it gives: one array, or several in parentheses."""
    opcode: str
    operands: list[str]
    """The names of the instructions that give its operands."""
    line: str
    """All of it, attributes included."""


@dataclass
class Computation:
    """A function of a program."""

    name: str
    lines: list[str] = field(default_factory=list)
    """Its instructions as text."""
    runs: int = 0
    """How often it runs in one run of the program."""
    is_exact: bool = True
    """False in a loop whose number of iterations the program does not say. Such a loop is counted once."""
    op_name: str = ""
    """Where it comes from: the path of JAX functions that its first caller has, or nothing."""

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Its instructions by name, in the order in which they run."""
        matches = (re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(", line) for line in self.lines)
        return {
            match[1]: Instruction(match[1], match[2], match[3], operands(line), line)
            for match, line in zip(matches, self.lines, strict=True)
            if match is not None
        }


def computations(text: str) -> dict[str, Computation]:
    """The computations of a compiled program, `compiled.as_text()`, callees before their callers and the entry last.

    Every branch of a conditional is counted.
    """
    found = _divided(text)
    for computation in reversed(found.values()):
        for line in computation.lines:
            _call(line, op_name(line) or computation.op_name, computation, found)
    return found


def operands(line: str) -> list[str]:
    """The names of the operands of an instruction."""
    arguments = re.search(r"[\w\-]\((%[^()]*)\)", line)
    return re.findall(r"%([\w.\-]+)", arguments[1]) if arguments else []


def op_name(line: str) -> str:
    """The path of JAX functions that an instruction comes from, or nothing."""
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1] if name else ""


class ArraySize(NamedTuple):
    """An array of a shape."""

    num_bytes: int
    is_scalar: bool
    memory_space: int
    """0 is the memory of the device; on a TPU, 1 is the vector memory within the chip."""


def arrays(shape: str) -> Iterator[ArraySize]:
    """The arrays of a shape."""
    for _, bits, dimensions, layout in re.findall(r"\b(pred|[a-z]+?(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?", shape):
        elements = math.prod(int(size) for size in dimensions.split(",") if size)
        space = re.search(r"S\((\d+)\)", layout)
        yield ArraySize(math.ceil(elements * int(bits or 8) / 8), not dimensions, int(space[1]) if space else 0)


def _divided(text: str) -> dict[str, Computation]:
    found: dict[str, Computation] = {}
    current = None
    for line in text.splitlines():
        begin = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begin:
            current = found[begin[2]] = Computation(begin[2], runs=int(begin[1] is not None))
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.lines.append(line)
    return found


def _call(line: str, op_name: str, caller: Computation, found: dict[str, Computation]) -> None:
    """Add the runs of what this instruction calls. What the start of an asynchronous one calls, its done does not."""
    if "async-done(" in line or "async-update(" in line:
        return
    trips = _trip_count(line, caller, found) if " while(" in line else 1
    for names in re.findall(r"(?:calls|body|condition|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)", line):
        for name in re.findall(r"[\w.\-]+", names):
            if (callee := found.get(name)) is not None:
                callee.runs += caller.runs * (1 if trips is None else trips)
                callee.is_exact &= caller.is_exact and trips is not None
                callee.op_name = callee.op_name or op_name


def _trip_count(line: str, caller: Computation, found: dict[str, Computation]) -> int | None:
    """How often a loop runs, None if that is not known.

    XLA notes it, but not for TPUs. There it is where a counter begins and the constant that it is compared with: the
    counters of JAX's loops of known length go up by one.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = found[re.search(r"condition=%?([\w.\-]+)", line)[1]].lines  # type: ignore[index]
    limits = [int(limit) for row in condition for limit in re.findall(r" [su]\d+\[\]\S* constant\((-?\d+)\)", row)]
    indices = [int(index) for row in condition for index in re.findall(r"get-tuple-element\(.*index=(\d+)", row)]
    if len(limits) != 1 or len(indices) != 1 or not any("direction=LT" in row for row in condition):
        return None
    carried = caller.instructions.get((operands(line) or [""])[0])
    if carried is None or indices[0] >= len(carried.operands):
        return None
    start = _constant(carried.operands[indices[0]], caller)
    return None if start is None else limits[0] - start


def _constant(name: str, computation: Computation) -> int | None:
    """The value of an instruction that is a constant, or a copy of one."""
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    if value := re.search(r" constant\((-?\d+)\)", instruction.line):
        return int(value[1])
    is_copy = instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start")
    return _constant(instruction.operands[0], computation) if is_copy else None
