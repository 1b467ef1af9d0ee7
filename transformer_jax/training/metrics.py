"""Figures of a run: `metrics.jsonl` and TensorBoard events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from transformer_jax.data import Split
from transformer_jax.training.workdir import Workdir

SCORES = {"bleu": "BLEU", "chrf": "chrF"}


class MetricsLog:
    """Appends a line for each (step, split). What a killed run wrote beyond `step` is forgotten first."""

    def __init__(self, workdir: Workdir, step: int):
        from tensorboardX import SummaryWriter  # slow to import, and only needed in training

        lines = [line for line in read_metrics(workdir.metrics_file) if line["step"] <= step]
        partial = workdir.metrics_file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        partial.replace(workdir.metrics_file)
        self._seen = {(line["step"], line["split"]) for line in lines}
        self._file: TextIO = workdir.metrics_file.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(workdir.tensorboard), purge_step=step + 1)

    def has(self, step: int, split: Split) -> bool:
        """Whether there is a line of this step and split."""
        return (step, split) in self._seen

    def write(self, step: int, split: Split, figures: Mapping[str, float | str]) -> None:
        """Add a line, unless there is one of this step and split."""
        if self.has(step, split):
            return
        self._seen.add((step, split))
        self._file.write(json.dumps({"step": step, "split": split, **figures}) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if not isinstance(value, str):
                self._events.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
        self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last one that was cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def describe(figures: Mapping[str, float | str]) -> str:
    """Figures as people read them: shares in percent, scores with two decimals, the rest with four."""
    words = []
    for name, value in figures.items():
        if isinstance(value, str):
            continue
        if name.endswith("match"):
            words.append(f"{name.replace('_', ' ')} {value:.2%}")
        elif name in SCORES:
            words.append(f"{SCORES[name]} {value:.2f}")
        else:
            words.append(f"{name.replace('_', ' ')} {value:.4f}")
    return ", ".join(words)
