"""The folder that a run lives in: its config, tokenizer, metrics and checkpoints."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.atomic import PREFIX, atomic
from transformer_jax.errors import UserError
from transformer_jax.training.config import Config, from_json, to_json
from transformer_jax.training.lock import NAME as LOCK

FREE = (
    *("steps", "strategy", "evaluate_every", "save_every", "log_every", "keep", "workers", "workdir"),
    "data.allow_empty",
)
"""Fields that change no number of the training: a run may go on with others."""

UNDECIDED = {"model.vocab_size": None, "model.pad_id": None, "model.dtype": "auto", "optimizer.total_steps": None}
"""Fields that the tokenizer, the machine or the run decides where the config has these values."""


@dataclass(frozen=True)
class Workdir:
    """The paths of a run, and what was resolved when it began."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> "Workdir":
        """The workdir that a config names."""
        if config.workdir is None:
            raise UserError("workdir is not set; give --workdir")
        return cls(config.workdir)

    @property
    def config_file(self) -> Path:
        """All settings, as resolved."""
        return self.path / "config.json"

    @property
    def tokenizer_file(self) -> Path:
        """The trained tokenizer."""
        return self.path / "tokenizer.json"

    @property
    def examples(self) -> Path:
        """The encoded training set."""
        return self.path / "examples"

    @property
    def examples_mark(self) -> Path:
        """A hash of the training data that the run was begun with."""
        return self.path / "examples.sha256"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder per kept step."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"

    def check(self, config: Config) -> None:
        """Raise where a run with this config cannot begin or go on, at the first difference that matters.

        Fields that are not decided yet are no difference, so that this can be known before a tokenizer is trained.
        """
        if self.config_file.exists():
            before, now = _flat(to_json(self.config())), _flat(to_json(config))
            for name in {**before, **now}:
                old, new = before.get(name), now.get(name)
                undecided = name in UNDECIDED and new == UNDECIDED[name]
                if name not in FREE and old != new and not undecided:
                    raise UserError(
                        f"{self.path} was begun with {name}={json.dumps(old)} but {json.dumps(new)} is asked for; "
                        "give another --workdir, or the same settings to go on"
                    )
        elif self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
            raise UserError(f"{self.path} exists and is not a run; give another --workdir")

    def claim(self, config: Config) -> None:
        """Write the config down, or, where there is one, raise at the first difference that matters."""
        self.check(config)
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_json(dataclasses.replace(config, workdir=None)), indent=2, ensure_ascii=False)
        with atomic(self.config_file) as unfinished:
            # A file name that is no text has lone surrogates, for which this writes JSON's own escapes.
            unfinished.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def config(self) -> Config:
        """The config that the run was begun with."""
        if not self.config_file.is_file():
            there = "is not a run (it has no config.json)" if self.path.is_dir() else "does not exist"
            raise UserError(f"workdir {self.path} {there}; make one with: python train.py --workdir {self.path}")
        try:
            return from_json(Config, json.loads(self.config_file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"{self.config_file} cannot be read: {error}") from error


def _is_foreign(path: Path) -> bool:
    """Whether a file is none that a training leaves behind which was killed before it had written its config."""
    return path.name != LOCK and not path.name.startswith(PREFIX)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{name}" if prefix else name) for name, item in value.items()]
    return {name: item for part in parts for name, item in part.items()}
