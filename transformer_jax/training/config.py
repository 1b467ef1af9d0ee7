"""The config of a run: one frozen value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.data import BatchingConfig, ProcessorConfig, Source, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import ModelConfig
from transformer_jax.parallel import MeshConfig, Rules, StrategyName
from transformer_jax.tasks import TaskConfig, TranslationConfig
from transformer_jax.training.optimizer import OptimizerConfig

MatmulPrecision = Literal["tensorfloat32", "bfloat16"]
"""By JAX's names: on a TPU, three products of bfloat16 numbers and one; on a GPU, TensorFloat-32 and bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A training run: what is trained, on what, and how."""

    model: ModelConfig | None = None
    """The architecture; None takes that of the checkpoint that init_from names."""
    data: Source
    """Where the records come from."""
    task: TaskConfig = TranslationConfig()
    """What the model is trained to do."""
    processor: ProcessorConfig | None = TokenizerConfig()
    """What the task encodes records with: a tokenizer, another processor, or nothing."""
    batching: BatchingConfig = BatchingConfig()
    """How examples become batches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How gradients become updates."""
    init_from: str | None = None
    """A checkpoint of transformers (a folder, or a name on the hub) or a run of this package to start from: its sizes
    and weights replace those of the model, and its tokenizer is used unless processor.path names another."""
    steps: int
    """Number of updates to train for; a finished run goes on when this is raised."""
    accumulate: int = 1
    """Number of micro-batches that an update is computed in, which saves memory and gives the same gradient."""
    seed: int = 0
    """Seed of the initial parameters, the dropout and the order of the examples."""
    matmul_precision: MatmulPrecision | None = None
    """Precision of matrix products of float32 numbers on TPU and GPU; None is float32, the others are faster."""
    strategy: StrategyName = "jit"
    """Run with jit on the mesh, or with pmap, which has all weights on every device."""
    mesh: MeshConfig = MeshConfig()
    """How the devices of all processes are arranged; by default all share the batch and each has all weights."""
    rules: Rules = Rules()
    """What is sharded over which axis of the mesh."""
    evaluate_every: int = 1000
    """Number of steps between evaluations on the validation split."""
    evaluate_examples: int = 2000
    """Most examples of the validation split to evaluate on during training, evenly spaced; of a language model's text
    most rows. The test split is evaluated whole."""
    save_every: int = 1000
    """Number of steps between checkpoints; each evaluation makes one too."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Stop the training at a batch whose loss or gradient is not finite, or skip it, so that it changes no weight; such
    a batch is kept in the run's folder."""
    step_timeout: float | None = 1800.0
    """Seconds after which a step that has not ended counts as hung, and ends the process; None waits for ever."""
    profile: tuple[int, int] | None = None
    """First and last step to write a profiler trace of, which TensorBoard and Perfetto show; None writes none."""
    compilation_cache: Path | None = None
    """Folder that compiled programs are kept in, so that they need not be compiled again; None keeps them in memory."""
    workers: int = 0
    """Number of processes that make batches ahead of the step; 0 makes them in a thread."""
    log_every: int = 50
    """Number of steps between lines of metrics.jsonl."""
    keep: int = 3
    """Number of the newest checkpoints to keep, besides the best one."""
    workdir: Path | None = None
    """Folder of the run; runs/NAME for configs/NAME.py by default."""

    def __post_init__(self):
        if isinstance(self.workdir, str):
            object.__setattr__(self, "workdir", Path(self.workdir))
        counts = ("steps", "accumulate", "evaluate_every", "evaluate_examples", "save_every", "log_every", "keep")
        for name in counts:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.step_timeout is not None and self.step_timeout <= 0:
            raise UserError(f"step_timeout must be above 0, or None; got {self.step_timeout}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise UserError(f"profile needs a first step of at least 1 and a last step after it; got {self.profile}")
        if self.workers < 0:
            raise UserError(f"workers must not be negative; got {self.workers}")
        if self.model is None and self.init_from is None:
            raise UserError("there is no model; set model, or init_from to a checkpoint to start from")
        if self.model is not None:
            check_model(self.task, self.model)


def check_fields(task: TaskConfig, data: Source) -> None:
    """Raise unless the records of a source have all that the task reads."""
    known = data.fields()
    if not set(task.fields) <= set(known):
        raise UserError(
            f"{type(task).__name__} needs records with {' and '.join(task.fields)}; those of {type(data).__name__} "
            f"have {' and '.join(known)}"
        )


def check_model(task: TaskConfig, model: ModelConfig) -> None:
    """Raise unless the task can train a model of this config."""
    if not isinstance(model, task.models):
        fitting = " or ".join(kind.__name__ for kind in task.models)
        raise UserError(f"{type(task).__name__} is for {fitting}; model is a {type(model).__name__}")
