"""A plan as a page of tables."""

import sys

from rich.console import Console
from rich.table import Table

from transformer_jax.training.plan import Attempt, ParameterGroup, Plan

SHOWN = 10  # groups of parameters; the others are one row
WIDTH = 132  # where it is not printed to a terminal


def print_plan(plan: Plan) -> None:
    """Print all of a plan."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    axes = " ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    console.print(f"{plan.num_devices} x {plan.device_kind}, mesh {axes}", markup=False)
    console.print(f"batch: {_batch(plan)}; {'; '.join(plan.assumptions)}", markup=False)
    for table in (_parameters(plan), _memory(plan), _collectives(plan)):
        console.print(table, markup=False)
    for line in (*_flops(plan), *_estimate(plan), f"compiled in {plan.compile_seconds:.0f} s", *_verdict(plan)):
        console.print(line, markup=False)


def _batch(plan: Plan) -> str:
    shapes = {name: shape for name, shape in plan.batch.items() if len(shape) > 1 and not name.endswith("_segments")}
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in (shapes or plan.batch).items())


def _parameters(plan: Plan) -> Table:
    table = Table("weight", "shape, by logical axis", "sharded over", "MiB per device", title="parameters")
    table.columns[0].overflow = "fold"
    table.columns[-1].justify = "right"
    for group in plan.parameters[:SHOWN]:
        shape = " ".join(f"{axis}={size}" for axis, size in zip(group.axes, group.shape, strict=True))
        table.add_row(_names(group), shape, group.spec, f"{group.bytes_per_device / 2**20:,.2f}")
    rest = plan.parameters[SHOWN:]
    if rest:
        count = sum(len(group.names) for group in rest)
        size = sum(group.bytes_per_device for group in rest)
        table.add_row(f"{count} others", "", "", f"{size / 2**20:,.2f}")
    table.add_section()
    table.add_row(f"{plan.num_parameters:,} in all", "", "", f"{plan.parameter_bytes / 2**20:,.2f}")
    return table


def _names(group: ParameterGroup) -> str:
    """The name of a weight; of several, the first and how many more there are."""
    more = len(group.names) - 1
    return f"{group.names[0]}{f' and {more} more' if more else ''}"


def _memory(plan: Plan) -> Table:
    table = Table("", "GiB per device", title="memory")
    table.columns[1].justify = "right"
    rows = {"parameters": plan.parameter_bytes, "optimizer state": plan.optimizer_bytes, "batch": plan.batch_bytes}
    if plan.peak_bytes is not None:
        rows["gradients, activations and other temporaries"] = plan.peak_bytes - sum(rows.values())
    for name, size in rows.items():
        table.add_row(name, f"{size / 2**30:.3f}")
    table.add_section()
    table.add_row("needed in all", "unknown" if plan.peak_bytes is None else f"{plan.peak_bytes / 2**30:.3f}")
    if plan.available_bytes is not None:
        table.add_row("memory of the device", f"{plan.available_bytes / 2**30:.3f}")
    return table


def _collectives(plan: Plan) -> Table:
    table = Table("", "runs", "MiB sent per device", title="collectives of one step")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, traffic in plan.collectives.items():
        name = "send (between slices)" if kind == "send" else kind
        table.add_row(name, f"{traffic.count:,}", f"{traffic.bytes_moved / 2**20:,.1f}")
    if not plan.collectives:
        table.add_row("none" if plan.memory is not None else "unknown: it was not compiled", "", "")
    return table


def _flops(plan: Plan) -> list[str]:
    each = plan.model_flops / plan.num_devices
    again = plan.executed_flops / max(plan.model_flops, 1) - 1
    return [
        f"model FLOPs of a step: {plan.model_flops:.4g}, {each:.4g} per device (3 x the matrix products of the forward "
        f"pass; recomputation not counted, it takes {max(again, 0):.0%} more)"
    ]


def _estimate(plan: Plan) -> list[str]:
    found = plan.estimate
    if found is None:
        return []
    parts = [f"matrix products {_time(found.compute_seconds)}"]
    if found.memory_seconds is not None:
        parts.append(f"memory {_time(found.memory_seconds)}")
    parts.append(f"interconnect {_time(found.interconnect_seconds)}")
    lines = [
        f"ESTIMATE, not measured, for {found.chip}: a step takes at least {_time(found.seconds)} ({', '.join(parts)}, "
        f"all at their published peaks and overlapped), so the model FLOPs utilization is at most "
        f"{found.model_flops_utilization:.0%}; bound by {found.bound}"
    ]
    if "send" in plan.collectives:
        lines.append("  (without what is sent between slices, over the network of the data center)")
    if found.memory_seconds is None:
        lines.append("  (memory and collectives are of a program for CPU, which computes some of bfloat16 in float32)")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def _verdict(plan: Plan) -> list[str]:
    if plan.fits is None:
        return []
    if plan.fits:
        return ["fits"]
    return ["does not fit", *map(_attempt, plan.attempts), plan.advice]


def _attempt(attempt: Attempt) -> str:
    size = "" if attempt.peak_bytes is None else f" ({attempt.peak_bytes / 2**30:.2f} GiB)"
    return f"  compiled with {' '.join(attempt.flags)}: {'fits' if attempt.fits else 'does not fit'}{size}"
