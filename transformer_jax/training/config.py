"""The config of a run: one frozen value, to and from JSON."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformer_jax.data import BatchingConfig, Dates, Files, Mixture, Records, Source, Text, Tfds, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import ModelConfig
from transformer_jax.parallel import StrategyName
from transformer_jax.tasks import TaskConfig, TranslationConfig
from transformer_jax.training.optimizer import OptimizerConfig

MatmulPrecision = Literal["tensorfloat32", "bfloat16"]
"""By JAX's names: on a TPU, three products of bfloat16 numbers and one; on a GPU, TensorFloat-32 and bfloat16."""

Data = Dates | Files | Text | Tfds | Records | Mixture


@dataclass(frozen=True)
class Config:
    """A training run: what is trained, on what, how, and how it is watched."""

    model: ModelConfig
    data: Data
    optimizer: OptimizerConfig
    steps: int
    """Updates to train for. A finished run goes on when this is raised."""
    task: TaskConfig = TranslationConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    batching: BatchingConfig = BatchingConfig()
    accumulate: int = 1
    """Micro-batches per update: less memory, the same gradient."""
    seed: int = 0
    """Of the initial parameters, the dropout and the order of the examples."""
    matmul_precision: MatmulPrecision | None = None
    """Precision of matrix products of float32 numbers on TPU and GPU: faster ones, or None for all of float32."""
    strategy: StrategyName = "auto"
    """One device with jit, or all of this machine with pmap; auto takes pmap where there are several."""
    evaluate_every: int = 1000
    """Steps between evaluations on the validation split."""
    save_every: int = 1000
    """Steps between checkpoints; each evaluation makes one too."""
    workers: int = 0
    """Processes that make batches ahead of the step; 0 makes them in a thread."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    keep: int = 3
    """Newest checkpoints to keep, besides the best."""
    workdir: Path | None = None
    """Where the run lives; runs/NAME for configs/NAME.py by default."""

    def __post_init__(self):
        for name in ("steps", "accumulate", "evaluate_every", "save_every", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.workers < 0:
            raise UserError(f"workers must not be negative; got {self.workers}")
        if not isinstance(self.model, self.task.models):
            fitting = " or ".join(kind.__name__ for kind in self.task.models)
            raise UserError(f"{type(self.task).__name__} is for {fitting}; model is a {type(self.model).__name__}")
        missing = [field for field in self.task.fields if field not in self.data.fields()]
        if missing:
            raise UserError(
                f"{type(self.task).__name__} needs records with {' and '.join(self.task.fields)}; those of "
                f"{type(self.data).__name__} have {' and '.join(self.data.fields())}"
            )


def to_json(value: Any) -> Any:
    """A config as JSON; a dataclass becomes an object that names its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_json(kind: Any, value: Any) -> Any:
    """The config of type `kind` that `to_json` made this of."""
    if isinstance(value, dict):
        if get_origin(kind) is dict:
            return value
        kind = Data if get_origin(kind) is Source else kind
        kinds: dict[str, Any] = {option.__name__: option for option in get_args(kind) or (kind,)}
        if value.get("type") not in kinds:
            raise UserError(f"the config has a {value.get('type')} where {' or '.join(kinds)} was expected")
        chosen = kinds[value["type"]]
        hints = get_type_hints(chosen)
        unknown = set(value) - set(hints) - {"type"}
        if unknown:
            raise UserError(f"{chosen.__name__} has no {sorted(unknown)[0]!r}; the config is of another version")
        return chosen(**{name: from_json(hints[name], item) for name, item in value.items() if name != "type"})
    if isinstance(value, list):
        item_kind = (*get_args(kind), Any)[0]
        return tuple(from_json(item_kind, item) for item in value)
    return Path(value) if isinstance(value, str) and Path in (kind, *get_args(kind)) else value
