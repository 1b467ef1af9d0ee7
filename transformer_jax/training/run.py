"""A run: its config, and the parts that follow from it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from transformer_jax.atomic import as_path, atomic, is_remote
from transformer_jax.errors import UserError
from transformer_jax.parallel import MeshConfig, Strategy
from transformer_jax.tasks import Predictor, Task
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.config import Config
from transformer_jax.training.resolve import resolve_again, resolve_new
from transformer_jax.training.saved import saved_step
from transformer_jax.training.start import Start, load_start, transfer_weights
from transformer_jax.training.state import TrainState
from transformer_jax.training.workdir import Workdir


@dataclass(frozen=True)
class Run:
    """A workdir, the resolved config in it, and what that config describes."""

    workdir: Workdir
    config: Config
    processor: Any
    """A tokenizer, another processor, or None."""
    task: Task
    optimizer: optax.GradientTransformation
    strategy: Strategy
    start: Start | None = field(default=None, repr=False)
    """What a new run starts from."""

    @classmethod
    def begin(cls, config: Config, start: Start | None = None) -> "Run":
        """Begin a run in its workdir, or find it there again; the workdir of another one is refused.

        Args:
            config: what is trained.
            start: what `config.init_from` names, which is loaded now by default.
        """
        workdir = Workdir.of(config)
        workdir.check(config)
        before = workdir.config() if workdir.config_file.exists() else None
        if before is not None and saved_step(workdir.checkpoints) is not None:
            return cls._assemble(workdir, resolve_again(config, before), workdir.load_processor(before.processor))
        if start is None and config.init_from is not None:
            start = load_start(config.init_from, Strategy.choose(config.strategy, config.mesh, config.rules))
        kept = None if before is None else _kept_processor(workdir, before)
        config, processor = resolve_new(config, start, kept, before)
        run = cls._assemble(workdir, config, processor, start)
        # Raises if the parts do not fit each other, or the mesh, while nothing is written.
        run.strategy.shardings(jax.eval_shape(run.initial_state))
        workdir.claim(config)
        workdir.save_processor(processor)
        return run

    @classmethod
    def join(cls, config: Config, start: Start | None = None) -> "Run":
        """The run that another process has begun with this config."""
        workdir = Workdir.of(config, read_only=True)
        if not workdir.is_run():
            raise UserError(
                f"the first process has begun a run in {workdir.path}, which this one does not see; give a --workdir "
                "on a file system that all processes share"
            )
        before = workdir.config()
        return cls._assemble(workdir, resolve_again(config, before), workdir.load_processor(before.processor), start)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """The run that lives in a workdir, for inference: on its mesh if that fits the devices here, else on all."""
        workdir = Workdir(Path(path))
        config = _on_these_devices(workdir.config())
        return cls._assemble(workdir, config, workdir.load_processor(config.processor))

    @classmethod
    def _assemble(cls, workdir: Workdir, config: Config, processor: Any, start: Start | None = None) -> "Run":
        task = config.task.build(processor, config.model, config.batching)
        optimizer = config.optimizer.build(getattr(config.model, "d_model", None))
        strategy = Strategy.choose(config.strategy, config.mesh, config.rules)
        return cls(workdir, config, processor, task, optimizer, strategy, start)

    def abstract_model(self) -> Any:
        """The model with shapes and types in place of its weights."""
        return jax.eval_shape(lambda: self.config.model.build(nnx.Rngs(0)))  # type: ignore[union-attr]

    def initial_state(self) -> TrainState:
        """The state before the first update, without the weights of `init_from`: a function of the seed."""
        return self._state_of(self._initial_model())

    def _initial_model(self) -> Any:
        key, _ = jax.random.split(jax.random.key(self.config.seed))
        return self.config.model.build(nnx.Rngs(key))  # type: ignore[union-attr]

    def _state_of(self, model: Any) -> TrainState:
        _, dropout_key = jax.random.split(jax.random.key(self.config.seed))
        return TrainState.create(model, self.optimizer, dropout_key)

    def first_state(self) -> tuple[TrainState, str]:
        """The state before the first update, and what it was started from, for people; "" for nothing."""
        if self.config.init_from is None:
            return self.strategy.initialize(self.initial_state), ""
        start = self.start or load_start(self.config.init_from, self.strategy)
        model, report = transfer_weights(start.model, self.strategy.initialize(self._initial_model), start.name)
        return self.strategy.initialize(self._state_of, model), report

    def restored_state(self, checkpoints: Checkpoints, step: int | None = None) -> TrainState:
        """The state of a checkpoint, by default the newest, in the shards of this run's mesh."""
        like = jax.eval_shape(self.initial_state)
        return checkpoints.restore(like, step, shardings=self.strategy.shardings(like))

    def replace(self, **changes: Any) -> "Run":
        """The same run with other fields of its config, such as `data` and `task`, for evaluation and inference."""
        return self._assemble(self.workdir, replace(self.config, **changes), self.processor)

    def precision(self) -> AbstractContextManager[None]:
        """Compute matrix products as the config says, while inside."""
        asked = self.config.matmul_precision
        return nullcontext() if asked is None else jax.default_matmul_precision(asked)

    def restored_model(self, step: int | None = None, *, dtype: Any = None) -> tuple[Any, int]:
        """The parameters of a checkpoint, by default the newest, in the shards of the mesh, and its step."""
        with self.checkpoints() as checkpoints:
            like = self.abstract_model()
            shardings = self.strategy.shardings(like)
            model = checkpoints.restore_model(like, step, dtype=dtype, shardings=shardings)
            return model, checkpoints.steps()[-1] if step is None else step

    def predictor(self, model: Any, **settings: Any) -> Predictor:
        """The model, ready to be run over examples; `settings` are those of a `Predictor`."""
        return Predictor(self.task, model, self.strategy, **settings)

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


def write_run(path: Path, config: Config, processor: Any, model: Any, step: int = 0) -> None:
    """A new run of a model without a training state, for inference and to start others from; all or nothing."""
    path = as_path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext(path) if is_remote(path) else atomic(path) as unfinished:
        workdir = Workdir(unfinished)
        checkpoints = Checkpoints(workdir.checkpoints)
        checkpoints.save_model(model, step)
        checkpoints.close()
        workdir.save_processor(processor)
        workdir.write_config(config)


def _on_these_devices(config: Config) -> Config:
    """A config with its mesh if that fits the devices here, else with all of them on the data axis."""
    try:
        Strategy.choose(config.strategy, config.mesh, config.rules)
    except UserError:
        return replace(config, mesh=MeshConfig())
    return config


def _kept_processor(workdir: Workdir, config: Config) -> Any:
    """The processor of a run that was killed before its first checkpoint; None if that was before it was written."""
    try:
        return workdir.load_processor(config.processor)
    except (UserError, OSError):
        return None
