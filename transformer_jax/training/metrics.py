"""Metrics of a run: `metrics.jsonl` and TensorBoard events."""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TextIO

from transformer_jax.atomic import PREFIX, atomic, is_remote, upload
from transformer_jax.data import Split
from transformer_jax.training.workdir import Workdir

SCORES = {"bleu": "BLEU", "chrf": "chrF"}
INTERVAL = 30.0


class MetricsLog:
    """Appends a line for each (step, split). What a killed run wrote beyond `step` is forgotten first.

    A log of a workdir that is read-only, as that of a process other than the first, only knows what it would have.
    """

    def __init__(self, workdir: Workdir, step: int):
        lines = [line for line in read_metrics(workdir.metrics_file) if line["step"] <= step]
        self._seen = {(line["step"], line["split"]) for line in lines}
        self._writer = None if workdir.read_only else _Writer(workdir, lines, first=step + 1)

    def has(self, step: int, split: Split) -> bool:
        """Whether there is a line of this step and split."""
        return (step, split) in self._seen

    def write(self, step: int, split: Split, metrics: Mapping[str, float | str]) -> None:
        """Add a line, unless there is one of this step and split."""
        if self.has(step, split):
            return
        self._seen.add((step, split))
        if self._writer is not None:
            self._writer.write(step, split, metrics)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """The file of lines and the TensorBoard events, which in a bucket cannot be appended to.

    There, both are written on this machine, and copied when an evaluation is through, else every `INTERVAL` seconds.
    """

    def __init__(self, workdir: Workdir, lines: Sequence[Mapping[str, Any]], first: int):
        self._path, self._tensorboard = workdir.metrics_file, workdir.tensorboard
        self._staging = Path(mkdtemp(prefix=PREFIX)) if is_remote(workdir.path) else None
        local = workdir.path if self._staging is None else self._staging
        self._local_path = local / self._path.name
        with atomic(self._local_path) as unfinished:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self._file: TextIO = self._local_path.open("a", encoding="utf-8")
        self._events = _Events(local / self._tensorboard.name, first)
        self._copied = -math.inf
        self._copy()

    def write(self, step: int, split: Split, metrics: Mapping[str, float | str]) -> None:
        self._file.write(json.dumps({"step": step, "split": split, **metrics}) + "\n")
        self._file.flush()
        scalars = {f"{split}/{name}": value for name, value in metrics.items() if not isinstance(value, str)}
        self._events.write(step, scalars)
        if split != "train" or time.monotonic() - self._copied > INTERVAL:
            self._copy()

    def close(self) -> None:
        self._file.close()
        self._events.close()
        self._copy()
        if self._staging is not None:
            shutil.rmtree(self._staging)

    def _copy(self) -> None:
        if self._staging is None:
            return
        upload(self._local_path, self._path)
        self._tensorboard.mkdir(exist_ok=True)
        for path in (self._staging / self._tensorboard.name).iterdir():
            upload(path, self._tensorboard / path.name)
        self._copied = time.monotonic()


class _Events:
    """A file of TensorBoard events. Those of earlier files from step `first` on no longer count.

    tensorboardX's own SummaryWriter writes in a thread: on a full disk that ends unnoticed, and training waits for it.
    """

    def __init__(self, folder: Path, first: int):
        from tensorboardX.event_file_writer import EventsWriter  # slow to import, and only needed in training
        from tensorboardX.proto.event_pb2 import SessionLog

        folder.mkdir(exist_ok=True)
        # The step in the name keeps a run that goes on within a second from writing over the file of before.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{first}")
        self._write(first, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(step=step, wall_time=time.time(), **content))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last one that was cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def describe(metrics: Mapping[str, float | str]) -> str:
    """Metrics as people read them: shares in percent, scores with two decimals, the rest with four."""
    words = []
    for name, value in metrics.items():
        if isinstance(value, str):
            continue
        if name.endswith("match"):
            words.append(f"{name.replace('_', ' ')} {value:.2%}")
        elif name in SCORES:
            words.append(f"{SCORES[name]} {value:.2f}")
        else:
            words.append(f"{name.replace('_', ' ')} {value:.4f}")
    return ", ".join(words)
