"""The folder that a run lives in: its config, tokenizer, metrics and checkpoints."""

import dataclasses
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformer_jax.atomic import PREFIX, as_path, atomic, cache_folder, is_remote, local_copy, upload
from transformer_jax.data import ProcessorConfig
from transformer_jax.errors import UserError
from transformer_jax.training.config import Config
from transformer_jax.training.lock import NAME as LOCK
from transformer_jax.training.serialization import from_json, to_json

FREE = (
    *("steps", "strategy", "evaluate_every", "evaluate_examples", "save_every", "log_every", "keep", "workers"),
    *("workdir", "data.allow_empty", "non_finite", "step_timeout", "profile", "compilation_cache"),
)
"""Fields that change no number of the training: a run may go on with others."""

FREE_GROUPS = ("mesh", "rules")
"""Groups of such fields."""

UNDECIDED = {"model.vocab_size": None, "model.pad_id": None, "model.dtype": "auto", "optimizer.total_steps": None}
"""Fields that the tokenizer, the machine or the run decides where the config has these values."""


@dataclass(frozen=True)
class Workdir:
    """The paths of a run, and what was resolved when it began. It may be in a bucket, such as gs://bucket/name."""

    path: Path
    read_only: bool = False
    """Whether nothing of the run is written to it, since another process of the run does."""

    def __post_init__(self):
        object.__setattr__(self, "path", as_path(self.path))

    @classmethod
    def of(cls, config: Config, *, read_only: bool = False) -> "Workdir":
        """The workdir that a config names."""
        if config.workdir is None:
            raise UserError("workdir is not set; give --workdir")
        return cls(config.workdir, read_only)

    @property
    def local(self) -> Path:
        """Where files are that must be on this machine: the workdir, or, of one in a bucket, a folder of the cache.

        Another run that is begun under the same name later has another folder.
        """
        if not is_remote(self.path):
            return self.path
        return cache_folder(str(self.path), self._id_file.read_text())

    @property
    def _id_file(self) -> Path:
        """What no other run has, for the cache."""
        return self.path / "run.id"

    @property
    def config_file(self) -> Path:
        """All settings, as resolved."""
        return self.path / "config.json"

    @property
    def examples(self) -> Path:
        """The encoded training and validation sets."""
        return self.local / "examples"

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

    def save_processor(self, processor: Any) -> None:
        """Write down what the task encodes records with; None is nothing."""
        if processor is None or self.read_only:
            return
        if not is_remote(self.path):
            processor.save(self.path)
            return
        with TemporaryDirectory() as folder:
            processor.save(Path(folder))
            for path in Path(folder).iterdir():
                upload(path, self.path / path.name)

    def load_processor(self, config: ProcessorConfig | None) -> Any:
        """What `save_processor` has written; None where the run has none."""
        if config is None:
            return None
        with local_copy(self.path) as folder:
            return config.load(folder)

    def check(self, config: Config) -> None:
        """Raise where a run with this config cannot begin or go on, at the first difference that matters.

        Fields that are not decided yet are no difference, so that this can be known before a tokenizer is trained.
        """
        if self.config_file.exists():
            old_config = self.config()
            old_type = type(old_config.model)
            before, now = _flat(to_json(old_config)), _flat(_without_download(to_json(config)))
            for name in {**before, **now}:
                old, new = before.get(name), now.get(name)
                if old != new and not _is_free(name) and not _is_decided_later(name, new, config, old_type):
                    raise UserError(
                        f"{self.path} was begun with {name}={json.dumps(old)} but {json.dumps(new)} is asked for; "
                        "give another --workdir, or the same settings to go on"
                    )
        elif self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
            raise UserError(f"{self.path} exists and is not a run; give another --workdir")

    def claim(self, config: Config) -> None:
        """Write the config down, or, where there is one, raise at the first difference that matters."""
        self.check(config)
        if not self.read_only:
            self.write_config(config)

    def write_config(self, config: Config) -> None:
        """Write the config down, which makes a run of the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        if is_remote(self.path) and not self._id_file.exists():
            self._id_file.write_text(uuid.uuid4().hex)
        text = json.dumps(to_json(dataclasses.replace(config, workdir=None)), indent=2, ensure_ascii=False)
        with atomic(self.config_file) as unfinished:
            # A file name that is no text has lone surrogates, for which this writes JSON's own escapes.
            unfinished.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def is_run(self) -> bool:
        """Whether a run was begun in this folder."""
        try:
            value = json.loads(self.config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(value, dict) and value.get("type") == Config.__name__

    def config(self) -> Config:
        """The config that the run was begun with."""
        return self._read(lambda value: from_json(Config, value))

    def setting(self, kind: Any, name: str) -> Any:
        """One field of the config, of type `kind`, without the types that the other fields name."""
        return self._read(lambda value: from_json(kind, value.get(name)))

    def _read(self, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """What is in config.json. That it says to download something is no reason to: the user has to say so."""
        if not self.config_file.is_file():
            there = "is not a run (it has no config.json)" if self.path.is_dir() else "does not exist"
            raise UserError(f"workdir {self.path} {there}; make one with: transformer-jax train --workdir {self.path}")
        try:
            value = json.loads(self.config_file.read_text(encoding="utf-8"))
            if not isinstance(value, dict) or value.get("type") != Config.__name__:
                hint = "a checkpoint of transformers becomes one with transformer-jax convert"
                raise UserError(f"it is not the config of a run; {hint}")
            return parse(_without_download(value))
        except UserError as error:
            raise UserError(f"{self.config_file}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{self.config_file} cannot be read: {type(error).__name__}: {error}") from error


def _is_free(name: str) -> bool:
    return name in FREE or name.partition(".")[0] in FREE_GROUPS


def _is_decided_later(name: str, value: Any, config: Config, model_type: type) -> bool:
    """Whether a field was decided when the run began, whatever the config says of it."""
    group, _, rest = name.partition(".")
    if name in UNDECIDED and value == UNDECIDED[name]:
        return True
    if group == "model" and rest.partition(".")[0] in config.task.decides:
        return True
    if config.init_from is None:
        return False
    # The checkpoint decides the model, but for what the config may adjust, and the processor, unless a path is given.
    if group == "model":
        return type(config.model) is not model_type or rest not in config.model.adjustable  # type: ignore[union-attr]
    return group == "processor" and getattr(config.processor, "path", None) is None


def _is_foreign(path: Path) -> bool:
    """Whether a file is none that a training leaves behind which was killed before it had written its config."""
    return path.name != LOCK and not path.name.startswith(PREFIX)


def _without_download(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_download(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_download(item) for name, item in value.items()}
    return kept | {"download": False} if "type" in kept and "download" in kept else kept


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{name}" if prefix else name) for name, item in value.items()]
    return {name: item for part in parts for name, item in part.items()}
