"""What devices send to each other, read from a compiled program."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from transformer_jax.parallel.hlo import Computation, arrays, computations, op_name

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send")
"""The operations that move bytes between devices. A `send` is what the TPU compiler makes of those between slices."""


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program that runs on many devices."""

    kind: str
    """One of `KINDS`."""
    size: int
    """Bytes, on one device, of the larger of its operand and its result: that of an all-gather is its result, that of a
    reduce-scatter its operand; for the others, both are equally large."""
    group_size: int
    """Number of devices that take part together."""
    runs: int
    """How often it runs: as often as the loops that it is in."""
    is_exact: bool
    """False in a loop whose number of iterations the program does not say. Such a loop is counted once."""
    op_name: str
    """Where it comes from: the path of JAX functions that XLA keeps, or nothing."""

    @property
    def bytes_moved(self) -> float:
        """Bytes that one device sends in all runs, when the devices pass them on in a ring, which moves the fewest.

        Of n devices, each sends 2 (n - 1) / n of the size in an all-reduce; (n - 1) / n in an all-gather, a
        reduce-scatter and an all-to-all; all of it in a collective-permute and a send.
        """
        others = (self.group_size - 1) / self.group_size
        share = {"all-reduce": 2 * others, "collective-permute": 1.0, "send": 1.0}.get(self.kind, others)
        return share * self.size * self.runs


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind."""

    count: int
    """How often they run."""
    bytes_moved: float
    """Bytes that one device sends in them."""


def collectives(text: str) -> list[Collective]:
    """The collective operations of a compiled program, `compiled.as_text()`, of a CPU, a GPU or a TPU.

    One that is split into a start and a done, or spread over the fusions of a TPU, is one. An all-reduce that a TPU
    fuses with the slice that each device keeps of it is a reduce-scatter. Every branch of a conditional is counted.
    """
    header = text.split("\n", 1)[0]
    num_devices = math.prod(int(size) for size in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header))
    return [
        Collective(*operation, computation.runs, computation.is_exact, op_name(line) or computation.op_name)
        for computation in computations(text).values()
        if computation.runs
        for line in computation.lines
        if (operation := _operation(line, computation, num_devices)) is not None
    ]


def summarize(found: Iterable[Collective]) -> dict[str, Traffic]:
    """The traffic of each kind of collective that there is, most bytes first."""
    total: dict[str, Traffic] = defaultdict(lambda: Traffic(0, 0.0))
    for collective in found:
        before = total[collective.kind]
        total[collective.kind] = Traffic(before.count + collective.runs, before.bytes_moved + collective.bytes_moved)
    return dict(sorted(total.items(), key=lambda item: -item[1].bytes_moved))


def _operation(line: str, computation: Computation, num_devices: int) -> tuple[str, int, int] | None:
    """The kind, size and group size of an instruction that is a collective."""
    match = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
    if match is None or (match[2] == "send" and "is_host_transfer=true" not in line):
        return None
    if "async_collective_fusion_config" in line and not any("AsyncCollectiveStart" in row for row in computation.lines):
        return None  # the same operation again, in a fusion that runs beside it or waits for it
    shape, kind, is_start = match.groups()
    group_size = _group_size(line) or num_devices
    sizes = [array.num_bytes for array in arrays(shape)]
    if kind == "send":
        return kind, sizes[0], group_size
    if is_start and kind != "all-reduce":  # operands and results, then scalars for the runtime
        sizes = [array.num_bytes for array in arrays(shape) if not array.is_scalar]
        sizes = sizes[len(sizes) // 2 :]
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter", sum(sizes), group_size
    return kind, sum(sizes) * (group_size if kind == "reduce-scatter" else 1), group_size


def _group_size(line: str) -> int:
    """The devices of a replica group, {{0,1},{2,3}}, [4,2]<=[8]T(1,0) or mesh['x'=4,'y'=2] {'x'}; 0 for all of them."""
    if pairs := re.search(r"source_target_pairs=(\{\{[\d,{}]*\}\})", line):
        return len(set(re.findall(r"\d+", pairs[1])))
    if explicit := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(explicit[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return 0
