"""The training loop."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax

from transformer_jax.data import Batches, Split
from transformer_jax.errors import UserError, out_of_space
from transformer_jax.training.checkpoints import Checkpoints, saved_step
from transformer_jax.training.config import Config
from transformer_jax.training.inputs import ahead_of_time
from transformer_jax.training.interrupt import Interrupt, Interrupted
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import MetricsLog, describe
from transformer_jax.training.progress import ProgressLine
from transformer_jax.training.run import Run
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import Batch, make_train_step
from transformer_jax.training.workdir import Workdir


def train(config: Config) -> tuple[Run, TrainState]:
    """Train until `config.steps` from the newest checkpoint of the workdir on, then evaluate on the test split.

    Raises `Interrupted` when asked to stop, after saving. The same call then goes on from there, and comes to the same
    end, bit for bit.
    """
    workdir = Workdir.of(config)
    workdir.check(config)  # before a lock is put into a folder of somebody else
    with _disk_errors(workdir), locked(workdir.path):
        run = Run.begin(config)
        checkpoints = Checkpoints(workdir.checkpoints, config.keep)
        if checkpoints.latest() is None:
            state = jax.jit(run.initial_state)()
        else:
            state = checkpoints.restore(jax.eval_shape(run.initial_state))
        state = run.strategy.replicate(state)
        metrics = MetricsLog(workdir, int(state.step))
        with ProgressLine(config.steps, int(state.step)) as progress, _closing(checkpoints, metrics):
            loop = _Loop(run, state, checkpoints, metrics, Interrupt(), progress)
            with run.precision():
                loop.run_until_stopped()
    return run, loop.state


@contextmanager
def _closing(*writers: Checkpoints | MetricsLog) -> Iterator[None]:
    """Finish what the writers are writing."""
    try:
        yield
    except KeyboardInterrupt:
        raise  # to end at once: what is unfinished has a temporary name, and no start looks at it
    except BaseException:
        for writer in writers:
            with suppress(Exception):  # the error that came first is the one to tell
                writer.close()
        raise
    for writer in writers:
        writer.close()


@contextmanager
def _disk_errors(workdir: Workdir) -> Iterator[None]:
    """Say of a full disk what can be done about it, whoever was writing."""
    try:
        yield
    except Exception as error:
        if not (reason := out_of_space(error)):
            raise
        raise UserError(
            f"{workdir.path}: {reason}; free some space, and the same command goes on from step "
            f"{saved_step(workdir.checkpoints):,}"
        ) from error


class _Loop:
    """The state of a run while it goes on. Figures of a step are read after the next one has been sent off."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        interrupt: Interrupt,
        progress: ProgressLine,
    ):
        self.run, self.state = run, state
        self._checkpoints, self._metrics, self._interrupt, self._progress = checkpoints, metrics, interrupt, progress
        self._learning_rate = jax.jit(run.config.optimizer.learning_rate(run.config.model.d_model))
        self._unread: tuple[int, dict[str, jax.Array]] | None = None
        self._restart_clock()

    def run_until_stopped(self) -> None:
        """Train and evaluate; save and raise `Interrupted` when asked to stop."""
        with self._interrupt.listen(rescue=self.save):
            try:
                self.train()
                self.evaluate("test")
            except Exception as error:
                if not self._interrupt.requested:
                    raise
                self.save()  # also where another error came of the signal, to a worker process for one
                raise Interrupted from error

    def train(self) -> None:
        config, strategy = self.run.config, self.run.strategy
        first = int(self.state.step)
        if self._evaluation_due(first) and not self._metrics.has(first, "valid"):
            self.evaluate("valid")  # which a stop had cut short
        if first >= config.steps:
            return
        horizon = config.optimizer.total_steps
        if config.optimizer.schedule != "inverse_square_root" and horizon is not None and horizon < config.steps:
            self._progress.note(f"note: the learning rate is zero from step {horizon:,} on (optimizer.total_steps)")
        step_function = strategy.compile(
            make_train_step(
                self.run.task.loss, self.run.optimizer, accumulate=config.accumulate, axis_name=strategy.axis_name
            )
        )
        for step, batch in enumerate(self._batches(first), first + 1):
            self.state, figures = step_function(self.state, batch)
            self._read()
            self._unread = (step, figures)
            if self._evaluation_due(step) or step % config.save_every == 0:
                self._read()
                self._checkpoints.save(self.state, self.evaluate("valid") if self._evaluation_due(step) else None)
                self._restart_clock()
            self._interrupt.check()

    def evaluate(self, split: Split) -> dict[str, float | str] | None:
        """Figures of a split, shown and written down; None when it is empty."""
        records = self.run.config.data.split(split)
        if not len(records):
            return None
        figures = self.run.task.evaluate(
            self.state.model, records, self.run.strategy, tick=lambda done: self._interrupt.check()
        )
        step = int(self.state.step)
        self._metrics.write(step, split, figures)
        self._progress.note(f"step {step:,}  {split}: {describe(figures)}")
        if split == "test":
            for name, value in figures.items():
                if isinstance(value, str):
                    self._progress.note(f"{name.replace('_', ' ')}: {value}")
        return figures

    def save(self) -> bool:
        """Save the newest state and wait until it is on disk; False in the middle of a step, which has taken it."""
        if any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            return False
        self._read()
        self._checkpoints.save(self.state)
        self._checkpoints.wait()
        return True

    def _evaluation_due(self, step: int) -> bool:
        return step > 0 and (step % self.run.config.evaluate_every == 0 or step == self.run.config.steps)

    def _batches(self, first: int) -> Iterator[Batch]:
        """The batches from step `first` on, made and sent ahead of time."""
        run, config = self.run, self.run.config
        examples = run.examples()
        layout = run.task.layout(examples)
        batches = Batches(layout, seed=config.seed, multiple=run.strategy.num_devices * config.accumulate)
        size = sum(leaf.size for leaf in jax.tree.leaves(self.state.model))
        self._progress.note(
            f"{size:,} parameters; {layout.describe()}; {batches.per_epoch:,} batches; {run.strategy.describe()}; "
            "the first steps take long: they are compiled"
        )
        return run.strategy.feed(ahead_of_time(batches, first, config.steps, config.workers))

    def _read(self) -> None:
        """Take in the figures of the step before."""
        if self._unread is None:
            return
        (step, arrays), self._unread = self._unread, None
        figures = {name: float(value) for name, value in arrays.items()}
        if not math.isfinite(figures["loss"]):
            raise UserError(
                f"the loss became {figures['loss']} at step {step}; the newest checkpoint is of step "
                f"{self._checkpoints.latest()}. Lower the learning rate, or set optimizer.clip_norm"
            )
        self._tokens += figures["tokens"]
        figures["tokens_per_second"] = self._tokens / (time.monotonic() - self._since)
        self._progress.update(step, figures["loss"], figures["tokens_per_second"])
        if step % self.run.config.log_every == 0:
            figures["learning_rate"] = float(self._learning_rate(step - 1))
            self._metrics.write(step, "train", figures)
            self._restart_clock()

    def _restart_clock(self) -> None:
        self._since, self._tokens = time.monotonic(), 0.0
