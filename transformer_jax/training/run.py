"""A run: its config, and the parts that follow from it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from transformer_jax.atomic import atomic
from transformer_jax.data import Tokenizer
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.models import GPTConfig, ModelConfig, make_model
from transformer_jax.models.precision import Precision
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import Task
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.config import Config
from transformer_jax.training.inputs import load_or_encode, load_or_train_tokenizer
from transformer_jax.training.state import TrainState
from transformer_jax.training.workdir import Workdir


@dataclass(frozen=True)
class Run:
    """A workdir, the resolved config in it, and what that config describes."""

    workdir: Workdir
    config: Config
    task: Task
    optimizer: optax.GradientTransformation
    strategy: Strategy

    @classmethod
    def begin(cls, config: Config) -> "Run":
        """Begin a run in its workdir, or find it there again; another one's workdir is refused."""
        workdir = Workdir.of(config)
        workdir.check(config)
        tokenizer = load_or_train_tokenizer(workdir, config)
        config = _resolve(config, tokenizer, workdir.config() if workdir.config_file.exists() else None)
        workdir.claim(config)
        tokenizer.save(workdir.tokenizer_file)
        return cls._assemble(workdir, config, tokenizer)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """The run that lives in a workdir."""
        workdir = Workdir(path)
        config = workdir.config()
        return cls._assemble(workdir, config, Tokenizer.load(workdir.tokenizer_file, config.tokenizer))

    @classmethod
    def _assemble(cls, workdir: Workdir, config: Config, tokenizer: Tokenizer) -> "Run":
        task = config.task.build(tokenizer, config.model, config.batching)  # type: ignore[arg-type]
        optimizer = config.optimizer.build(config.model.d_model)
        return cls(workdir, config, task, optimizer, Strategy.choose(config.strategy))

    def examples(self) -> Store:
        """The encoded training set."""
        return load_or_encode(self.workdir, self.config, self.task)

    def initial_state(self) -> TrainState:
        """The state before the first update: a function of the seed."""
        init_key, noise_key = jax.random.split(jax.random.key(self.config.seed))
        model = make_model(self.config.model, rngs=nnx.Rngs(init_key))
        return TrainState.create(model, self.optimizer, noise_key)

    def with_task(self, **changes: Any) -> "Run":
        """The same run with other settings of its task; None changes nothing."""
        changes = {name: value for name, value in changes.items() if value is not None}
        known = [field.name for field in fields(self.config.task)]
        for name in changes:
            if name not in known:
                kind = type(self.config.task).__name__
                raise UserError(f"{name} is an unknown setting of {kind}; it has {', '.join(known)}")
        task = replace(self.config.task, **changes)
        return self._assemble(self.workdir, replace(self.config, task=task), self.task.tokenizer)

    def precision(self) -> AbstractContextManager[None]:
        """Compute matrix products as the config says, while inside."""
        asked = self.config.matmul_precision
        return nullcontext() if asked is None else jax.default_matmul_precision(asked)

    def restored_model(self, step: int | None = None) -> tuple[Any, int]:
        """The model of a checkpoint, by default the newest, and its step."""
        with self.checkpoints() as checkpoints:
            state = checkpoints.restore(jax.eval_shape(self.initial_state), step)
        return self.strategy.replicate(state.model), int(state.step)

    @contextmanager
    def checkpoints(self) -> Iterator[Checkpoints]:
        """What the run has saved, to be read."""
        if not self.workdir.checkpoints.is_dir():
            raise UserError(f"{self.workdir.path} has no checkpoint yet; train it first")
        checkpoints = Checkpoints(self.workdir.checkpoints, read_only=True)
        try:
            if not checkpoints.steps():
                raise UserError(f"{self.workdir.path} has no checkpoint yet; train it first")
            yield checkpoints
        finally:
            checkpoints.close()


def write_run(path: Path, config: Config, tokenizer: Tokenizer, state: TrainState) -> None:
    """A new run with this state as its checkpoint, all or nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as unfinished:
        workdir = Workdir(unfinished)
        workdir.claim(config)
        tokenizer.save(workdir.tokenizer_file)
        checkpoints = Checkpoints(workdir.checkpoints)
        checkpoints.save(state)
        checkpoints.close()


def _resolve(config: Config, tokenizer: Tokenizer, before: Config | None) -> Config:
    """What the config leaves to the tokenizer, the machine and the run; a run that goes on keeps what it has."""
    optimizer = config.optimizer
    if optimizer.total_steps is None:
        optimizer = replace(optimizer, total_steps=before.optimizer.total_steps if before else config.steps)
    num_ids = tokenizer.vocab_size + config.task.num_extra_ids(tokenizer)
    model = _resolve_model(config.model, tokenizer, num_ids, before.model if before else None)
    return replace(config, model=model, optimizer=optimizer)


def _resolve_model(model: ModelConfig, tokenizer: Tokenizer, num_ids: int, before: ModelConfig | None) -> ModelConfig:
    if model.vocab_size is None:
        model = replace(model, vocab_size=num_ids)
    if model.dtype == "auto":
        here: Precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model = replace(model, dtype=before.dtype if before else here)
    if model.vocab_size is None or model.vocab_size < num_ids:
        raise UserError(f"the tokenizer and the task need {num_ids} ids but model.vocab_size is {model.vocab_size}")
    if not isinstance(model, GPTConfig):
        if model.pad_id is None:
            model = replace(model, pad_id=tokenizer.pad_id)
        if model.pad_id != tokenizer.pad_id:
            raise UserError(f"the tokenizer pads with id {tokenizer.pad_id} but model.pad_id is {model.pad_id}")
    return model
