"""The training loop."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import jax

from transformer_jax.data import Batches, Shard, Split
from transformer_jax.errors import UserError, out_of_space
from transformer_jax.tasks.predictor import num_rows
from transformer_jax.tasks.task import Loss
from transformer_jax.training.checkpoints import Checkpoints, saved_step
from transformer_jax.training.config import Config
from transformer_jax.training.examples import EncodedSplit, encode_split, training_examples, validation_examples
from transformer_jax.training.interrupt import Interrupt, Interrupted
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import MetricsLog, describe, read_metrics
from transformer_jax.training.prefetch import ahead_of_time
from transformer_jax.training.progress import ProgressLine
from transformer_jax.training.run import Run
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import make_train_step
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
        evaluated = {line["step"]: line for line in read_metrics(workdir.metrics_file) if line["split"] == "valid"}
        checkpoints = Checkpoints(workdir.checkpoints, config.keep, best=run.task.best, evaluated=evaluated)
        report = ""
        if checkpoints.latest() is None:
            state, report = run.first_state()
        else:
            state = run.restored_state(checkpoints)
        run = replace(run, start=None)  # whose weights would take memory to the end
        metrics = MetricsLog(workdir, int(state.step))
        with ProgressLine(config.steps, int(state.step), run.task.unit) as progress, _closing(checkpoints, metrics):
            if report:
                progress.note(report)
            if int(state.step):
                progress.note(f"going on from step {int(state.step):,}")
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
            f"{saved_step(workdir.checkpoints) or 0:,}"
        ) from error


class _Loop:
    """The state of a run while it goes on. Metrics of a step are read after the next one has been sent off."""

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
        self._learning_rate = jax.jit(run.config.optimizer.learning_rate(getattr(run.config.model, "d_model", None)))
        self._valid: EncodedSplit | None = None
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
            self._checkpoints.save(self.state, self.evaluate("valid"))  # which a stop had cut short
        if first >= config.steps:
            return
        horizon = config.optimizer.total_steps
        if config.optimizer.schedule != "inverse_square_root" and horizon is not None and horizon < config.steps:
            self._progress.note(f"note: the learning rate is zero from step {horizon:,} on (optimizer.total_steps)")
        step_function = strategy.compile(
            make_train_step(self._loss, self.run.optimizer, accumulate=config.accumulate, axis_name=strategy.axis_name),
            self.state,
        )
        for step, batch in enumerate(self._batches(first), first + 1):
            self.state, metrics = step_function(self.state, batch)
            self._read()
            self._unread = (step, metrics)
            if self._evaluation_due(step) or step % config.save_every == 0:
                self._read()
                self._checkpoints.save(self.state, self.evaluate("valid") if self._evaluation_due(step) else None)
                self._restart_clock()
            self._interrupt.check()

    def _loss(self, model: Any, batch: Mapping[str, jax.Array], key: jax.Array | None) -> Loss:
        return self.run.task.loss(self.run.config.optimizer.without_frozen_gradients(model), batch, key)

    def evaluate(self, split: Split) -> dict[str, float | str] | None:
        """Metrics of a split, shown and written down; None when it is empty."""
        if split == "valid":
            self._valid = self._valid or validation_examples(self.run.workdir, self.run.config, self.run.task)
        encoded = self._valid if split == "valid" else encode_split(self.run.config, self.run.task, split)
        if encoded is None or not len(encoded.records):
            if split == "valid":
                self._progress.note("there are no validation records: nothing is evaluated during the training")
            return None
        step, task = int(self.state.step), self.run.task
        layout = task.layout(encoded.examples, training=False)
        if not num_rows(layout):
            self._progress.note(f"step {step:,}  {split}: too short to evaluate on; it makes no row")
            return None
        limit = self.run.config.evaluate_examples if split == "valid" else None
        with self._progress.subtask(f"{split} split", num_rows(layout, limit)) as tick:

            def tick_and_check(num_rows: int) -> None:
                tick(num_rows)
                self._interrupt.check()

            predictor = self.run.predictor(self.state.model, tick=tick_and_check)
            metrics = predictor.evaluate(encoded.records, examples=encoded.examples, limit=limit)
        if task.best.metric not in metrics:
            raise UserError(
                f"{type(task).__name__}.best is {task.best.metric!r}, which is not among its metrics "
                f"({', '.join(metrics)})"
            )
        self._metrics.write(step, split, metrics)
        self._progress.note(f"step {step:,}  {split}: {describe(metrics)}")
        if split == "test":
            for name, value in metrics.items():
                if isinstance(value, str):
                    self._progress.note(f"{name.replace('_', ' ')}: {value}")
        return metrics

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

    def _batches(self, first: int) -> Iterator[Mapping[str, Any]]:
        """The batches from step `first` on, made and sent ahead of time."""
        run, config = self.run, self.run.config
        layout = run.task.layout(training_examples(run.workdir, config, run.task), training=True)
        multiple, shard = run.strategy.num_row_shards * config.accumulate, Shard(*run.strategy.process_rows)
        batches = Batches(layout, seed=config.seed, multiple=multiple, shard=shard)
        size = sum(leaf.size for leaf in jax.tree.leaves(self.state.model))
        facts = (f"{size:,} parameters", layout.describe(), run.task.describe(), f"{batches.per_epoch:,} batches")
        where = f"{run.strategy.describe()}; the first steps take long: they are compiled"
        self._progress.note("; ".join(filter(None, (*facts, where))))
        return run.strategy.feed(ahead_of_time(batches, first, config.steps, config.workers))

    def _read(self) -> None:
        """Take in the metrics of the step before."""
        if self._unread is None:
            return
        (step, arrays), self._unread = self._unread, None
        metrics = {name: float(value) for name, value in arrays.items()}
        if not math.isfinite(metrics["loss"]):
            raise UserError(
                f"the loss became {metrics['loss']} at step {step}; the newest checkpoint is of step "
                f"{self._checkpoints.latest()}. Lower the learning rate, or set optimizer.clip_norm"
            )
        unit = self.run.task.unit
        metrics[unit] = metrics.pop("weight")
        self._units += metrics[unit]
        metrics[f"{unit}_per_second"] = self._units / (time.monotonic() - self._since)
        self._progress.update(step, metrics["loss"], metrics[f"{unit}_per_second"])
        if step % self.run.config.log_every == 0:
            metrics["learning_rate"] = float(self._learning_rate(step - 1))
            self._metrics.write(step, "train", metrics)
            self._restart_clock()

    def _restart_clock(self) -> None:
        self._since, self._units = time.monotonic(), 0.0
