"""`transformer-jax checkpoints {list,show,diff,average,prune}`: what a run has kept, what is in it, and its mean.

What `show`, `diff` and `average` read, they read one array at a time.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from transformer_jax.atomic import as_path, is_remote
from transformer_jax.commands.runs import open_run
from transformer_jax.errors import UserError
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import describe, read_metrics
from transformer_jax.training.run import Run, write_run
from transformer_jax.training.saved import SavedArrays, array_name, commit_time

RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class List:
    """Print the steps of which there is a checkpoint, one a line."""

    workdir: RunFolder
    """Folder of the run."""
    long: bool = False
    """Print the size, the time and the validation metrics of each, too."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Print the steps."""
        run = open_run(self.workdir, self.config)
        with run.checkpoints() as checkpoints:
            steps = checkpoints.steps()
        if not self.long:
            print("\n".join(map(str, steps)))
            return
        evaluated = _evaluated(run)
        rows = [("step", "size", "saved", "valid")]
        for step in steps:
            folder = run.workdir.checkpoints / str(step)
            metrics = {name: value for name, value in evaluated.get(step, {}).items() if name not in ("step", "split")}
            rows.append((str(step), _bytes(_size(folder)), _local_time(commit_time(folder)), describe(metrics)))
        _print_table(rows, left=(2, 3))


@dataclass(frozen=True)
class ArraySummary:
    """What `show` says of an array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parameters: int
    bytes: int
    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> "ArraySummary":
        """The summary of an array; of one without numbers it is NaN."""
        wide = array.astype(np.float64)
        numbers = [float(f(wide)) if wide.size else float("nan") for f in (np.mean, np.std, np.min, np.max)]
        return cls(name, array.shape, str(array.dtype), array.size, array.nbytes, *numbers)


@dataclass(frozen=True)
class Show:
    """Print the name, shape, type and statistics of each array of parameters in a checkpoint."""

    workdir: RunFolder
    """Folder of the run, or of its checkpoints."""
    step: int | None = None
    """Step of the checkpoint; None takes the newest."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        """Print the table."""
        arrays = SavedArrays(self.workdir, self.step)
        summaries = [ArraySummary.of(name, arrays[name]) for name in arrays]
        parameters, size = sum(one.parameters for one in summaries), sum(one.bytes for one in summaries)
        if self.json:
            about = {"step": arrays.step, "parameters": parameters, "bytes": size}
            print(json.dumps({**about, "arrays": [asdict(one) for one in summaries]}))
            return
        rows: list[Sequence[str]] = [("name", "shape", "dtype", "parameters", "bytes", "mean", "std", "min", "max")]
        for one in summaries:
            shape = " x ".join(map(str, one.shape)) or "scalar"
            numbers = (f"{value:.4g}" for value in (one.mean, one.std, one.min, one.max))
            rows.append((one.name, shape, one.dtype, f"{one.parameters:,}", f"{one.bytes:,}", *numbers))
        _print_table(rows, left=(0, 1, 2))
        print(f"step {arrays.step}: {parameters:,} parameters in {len(summaries)} arrays, {_bytes(size)}")


@dataclass(frozen=True)
class Diff:
    """Compare the parameters of two checkpoints; ends with 0 if they are equal bit for bit, else with 1."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """Folder of a run, or of its checkpoints."""
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Folder of another run, or of the same."""
    step_a: int | None = None
    """Step of the checkpoint of A; None takes the newest."""
    step_b: int | None = None
    """Step of the checkpoint of B; None takes the newest."""

    def run(self) -> None:
        """Print the differences."""
        with _trouble():
            a, b = SavedArrays(self.a, self.step_a), SavedArrays(self.b, self.step_b)
            differences = list(_differences(a, b))
        print(f"A: {self.a}, step {a.step}\nB: {self.b}, step {b.step}")
        print("\n".join(differences) if differences else f"all {len(a)} arrays are equal bit for bit")
        if differences:
            raise SystemExit(1)


@dataclass(frozen=True)
class Average:
    """Make a new run of which the model is the mean of a run's checkpoints (Vaswani et al. 2017, section 6.1)."""

    workdir: RunFolder
    """Folder of the run."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the new run, for evaluate, generate, attention and to start other runs from."""
    last: int = 5
    """Number of the newest checkpoints to take; a run keeps as many as its setting keep says."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Write the new run and print which steps it is the mean of."""
        if self.last < 1:
            raise UserError(f"last must be at least 1; got {self.last}")
        if as_path(self.out).exists():
            raise UserError(f"{self.out} exists already; give another folder")
        run = open_run(self.workdir, self.config)
        with run.checkpoints() as checkpoints:
            steps = checkpoints.steps()[-self.last :]
        model = _mean(run.abstract_model(), [SavedArrays(run.workdir.checkpoints, step) for step in steps])
        write_run(self.out, run.config, run.processor, model, steps[-1])
        if len(steps) < self.last:
            print(f"note: there are only {len(steps)} checkpoints; train with --keep {self.last} to have more")
        print(f"{self.out} is the mean of the steps {', '.join(map(str, steps))}")


@dataclass(frozen=True)
class Prune:
    """Remove all checkpoints of a run but the newest and the one with the best validation metric."""

    workdir: RunFolder
    """Folder of the run."""
    keep: int
    """Number of the newest checkpoints to keep, besides the best one."""
    dry_run: bool = False
    """Only print which steps would be removed."""
    config: Path | None = None
    """Python file with the models, sources and tasks of the run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Remove them and print their steps."""
        if self.keep < 1:
            raise UserError(f"keep must be at least 1; got {self.keep}")
        run = open_run(self.workdir, self.config)
        with run.checkpoints():  # raises if there are none
            pass
        with nullcontext() if self.dry_run else locked(run.workdir.path):
            checkpoints = Checkpoints(
                run.workdir.checkpoints,
                self.keep,
                best=run.task.best,
                evaluated=_evaluated(run),
                read_only=self.dry_run,
            )
            try:
                surplus = checkpoints.surplus()
                kept = [step for step in checkpoints.steps() if step not in surplus]
                for step in () if self.dry_run else surplus:
                    checkpoints.delete(step)
            finally:
                checkpoints.close()
        removed = "would be removed" if self.dry_run else "removed"
        print(f"{removed}: {_steps(surplus)}; kept: {_steps(kept)}")


def _evaluated(run: Run) -> dict[int, dict[str, Any]]:
    """The validation metrics of a run's steps."""
    return {line["step"]: line for line in read_metrics(run.workdir.metrics_file) if line["split"] == "valid"}


def _mean(like: Any, saved: Sequence[SavedArrays]) -> Any:
    """A model like this one, of which every array is the mean of those that were saved."""

    def mean(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = array_name(path)
        for arrays in saved:
            if name not in arrays or arrays.abstract(name).shape != leaf.shape:
                raise UserError(f"checkpoint {arrays.step} is of another model: it has no {name} of shape {leaf.shape}")
        total = sum(arrays[name].astype(np.float64) for arrays in saved)
        return jax.numpy.asarray(total / len(saved), leaf.dtype)

    return jax.tree_util.tree_map_with_path(mean, like)


def _differences(a: SavedArrays, b: SavedArrays) -> Iterator[str]:
    """A line for each array that is not the same in both."""
    for name in sorted(a.keys() - b.keys()):
        yield f"{name}: only in A"
    for name in sorted(b.keys() - a.keys()):
        yield f"{name}: only in B"
    for name in a:
        if name not in b:
            continue
        before, after = a.abstract(name), b.abstract(name)
        if before.shape != after.shape:
            yield f"{name}: the shape is {before.shape} in A and {after.shape} in B"
        elif (line := _difference(a[name], b[name])) is not None:
            yield f"{name}: {line}"


def _difference(a: np.ndarray, b: np.ndarray) -> str | None:
    """How two arrays of one shape differ; None if they are equal bit for bit."""
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return None
    types = f"the type is {a.dtype} in A and {b.dtype} in B; " if a.dtype != b.dtype else ""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    absolute = np.abs(wide_a - wide_b)
    size = np.maximum(np.abs(wide_a), np.abs(wide_b))
    relative = np.divide(absolute, size, out=np.zeros_like(size), where=size != 0)
    return f"{types}largest difference {np.max(absolute):.3g}, relative {np.max(relative):.3g}"


@contextmanager
def _trouble() -> Iterator[None]:
    """End with 2 for a mistake, as the program diff does, since 1 says that there are differences."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _print_table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    """Print columns, of which some are aligned on the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _size(path: Path) -> int:
    """Number of bytes in a file, or in the files of a folder."""
    if path.is_dir():
        return sum(map(_size, path.iterdir()))
    status: Any = path.stat()
    return status.length if is_remote(path) else status.st_size


def _bytes(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.4g} GB"


def _local_time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
