"""A run: its config, and the parts that follow from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import optax
from flax import nnx

from transformer_jax.data import Tokenizer
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.models import Transformer
from transformer_jax.models.precision import Precision
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import Translation
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
    task: Translation
    optimizer: optax.GradientTransformation
    strategy: Strategy

    @classmethod
    def begin(cls, config: Config) -> "Run":
        """Begin a run in its workdir, or find it there again; another one's workdir is refused."""
        if config.workdir is None:
            raise UserError("workdir is not set; give --workdir")
        workdir = Workdir(config.workdir)
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
        task = Translation(
            tokenizer,
            config.model.max_length,
            config.label_smoothing,
            config.decoding,
            config.batching,
            config.bleu_tokenizer,
        )
        optimizer = config.optimizer.build(config.model.d_model)
        return cls(workdir, config, task, optimizer, Strategy.choose(config.strategy))

    def examples(self) -> Store:
        """The encoded training set."""
        return load_or_encode(self.workdir, self.config, self.task)

    def initial_state(self) -> TrainState:
        """The state before the first update: a function of the seed."""
        init_key, noise_key = jax.random.split(jax.random.key(self.config.seed))
        model = Transformer(self.config.model, rngs=nnx.Rngs(init_key))
        return TrainState.create(model, self.optimizer, noise_key)

    def with_beams(self, num_beams: int | None) -> "Run":
        """The same run with another beam size in evaluation and generation; None changes nothing."""
        if num_beams is None:
            return self
        decoding = replace(self.config.decoding, num_beams=num_beams)
        return replace(self, task=replace(self.task, decoding=decoding))

    def restored_model(self, step: int | None = None) -> tuple[Transformer, int]:
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


def _resolve(config: Config, tokenizer: Tokenizer, before: Config | None) -> Config:
    """What the config leaves to the tokenizer, the machine and the run; a run that goes on keeps what it has."""
    model, optimizer = config.model, config.optimizer
    if model.vocab_size is None:
        model = replace(model, vocab_size=tokenizer.vocab_size)
    if model.pad_id is None:
        model = replace(model, pad_id=tokenizer.pad_id)
    if model.dtype == "auto":
        here: Precision = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model = replace(model, dtype=before.model.dtype if before else here)
    if optimizer.total_steps is None:
        optimizer = replace(optimizer, total_steps=before.optimizer.total_steps if before else config.steps)
    if model.vocab_size is None or model.vocab_size < tokenizer.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size is {model.vocab_size}")
    if model.pad_id != tokenizer.pad_id:
        raise UserError(f"the tokenizer pads with id {tokenizer.pad_id} but model.pad_id is {model.pad_id}")
    return replace(config, model=model, optimizer=optimizer)
