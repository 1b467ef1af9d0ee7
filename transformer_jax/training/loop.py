"""The training loop."""

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from transformer_jax.atomic import atomic
from transformer_jax.data import Batches, Shard
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers, Strategy, Watchdog, alone
from transformer_jax.parallel.peers import Rescue
from transformer_jax.tasks.task import Loss
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.closing import closing, disk_errors
from transformer_jax.training.config import Config
from transformer_jax.training.diagnosis import first_non_finite, keep_batch
from transformer_jax.training.evaluation import Evaluation
from transformer_jax.training.examples import training_examples
from transformer_jax.training.interrupt import Interrupt, Interrupted, leave_saved
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.prefetch import ahead_of_time
from transformer_jax.training.profile import StepProfile
from transformer_jax.training.programs import Programs
from transformer_jax.training.progress import ProgressLine
from transformer_jax.training.run import Run
from transformer_jax.training.saved import saved_step
from transformer_jax.training.start import load_start
from transformer_jax.training.state import TrainState
from transformer_jax.training.step import make_train_step
from transformer_jax.training.throughput import Throughput
from transformer_jax.training.workdir import Workdir

MOST_KEPT = 10
"""Batches of skipped steps to keep."""
MOST_SKIPPED = 1000
"""Skipped steps after which a run is taken for lost."""


def train(config: Config, peers: Peers | None = None) -> tuple[Run, TrainState]:
    """Train until `config.steps` from the newest checkpoint of the workdir on, then evaluate on the test split.

    Raises `Interrupted` when asked to stop, after saving. The same call then goes on from there, and comes to the same
    end, bit for bit.

    Args:
        config: what is trained.
        peers: the processes that train together, each of which makes this call (`parallel.connect`); by default this
            one alone.
    """
    peers = alone() if peers is None else peers
    if config.compilation_cache is not None:
        _keep_programs(config.compilation_cache)
    workdir = Workdir.of(config, read_only=peers.index > 0)
    if peers.index == 0:
        workdir.check(config)  # before a lock is put into a folder of somebody else
    with disk_errors(workdir), locked(workdir.path) if peers.index == 0 else nullcontext():
        # The first process decides, since others may see an older state of the file system; all load weights together.
        (is_new, *_) = peers.gather(saved_step(workdir.checkpoints) is None)
        start = None
        if is_new and config.init_from is not None:
            start = load_start(config.init_from, Strategy.choose(config.strategy, config.mesh, config.rules))
        run = Run.begin(config, start) if peers.index == 0 else None
        peers.barrier("begin")
        run = run or Run.join(config, start)
        evaluated = {line["step"]: line for line in read_metrics(workdir.metrics_file) if line["split"] == "valid"}
        checkpoints = Checkpoints(workdir.checkpoints, config.keep, best=run.task.best, evaluated=evaluated)
        report = ""
        (latest, *_) = peers.gather(checkpoints.latest())
        if latest is None:
            state, report = run.first_state()
        else:
            state = run.restored_state(checkpoints, latest)
        run = replace(run, start=None)  # whose weights would take memory to the end
        metrics = MetricsLog(workdir, int(state.step))
        first, is_shown = int(state.step), peers.index == 0
        progress = ProgressLine(config.steps, first, run.task.unit, quiet=not is_shown)
        with progress, closing(checkpoints, metrics):
            if report:
                progress.note(report)
            if first:
                progress.note(f"going on from step {first:,}")
            loop = _Loop(run, state, checkpoints, metrics, peers, progress)
            with run.precision():
                loop.run_until_stopped()
    return run, loop.state


def _keep_programs(folder: Path) -> None:
    """Keep compiled programs in a folder, whatever their size."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _Loop:
    """The state of a run while it goes on. Metrics of a step are read after the next one has been sent off."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        peers: Peers,
        progress: ProgressLine,
    ):
        self.run, self.state = run, state
        self._checkpoints, self._metrics, self._peers, self._progress = checkpoints, metrics, peers, progress
        self._interrupt = Interrupt()
        self._learning_rate = jax.jit(run.config.optimizer.learning_rate(getattr(run.config.model, "d_model", None)))
        self._evaluate = Evaluation(run, metrics, progress, peers, self._check)
        self._throughput = Throughput(run.task.unit, run.strategy.devices)
        self._watchdog = Watchdog(run.config.step_timeout, "training step", tell=peers.fail)
        self._unread: tuple[int, dict[str, jax.Array], float | None] | None = None
        self._number = int(state.step)  # which a side thread can read without waiting for the devices
        self._dispatching = threading.RLock()
        self._num_skipped = 0
        self._recent: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=2)

    def run_until_stopped(self) -> None:
        """Train and evaluate; save and raise `Interrupted` when asked to stop."""
        if self._peers.count > 1:
            self._peers.on_stalled(Rescue(self._step_to_save, self.save, leave_saved))
            with self._interrupt.listen(rescue=lambda: False, on_request=self._peers.request_stop):
                self._train_and_test()
            return
        with self._interrupt.listen(rescue=self.save):
            try:
                self._train_and_test()
            except Exception as error:
                if not self._interrupt.requested:
                    raise
                self.save()  # also where another error came of the signal, to a worker process for one
                raise Interrupted from error

    def _train_and_test(self) -> None:
        with self._watchdog:
            self.train()
            with self._watchdog.pause():
                self._evaluate(self.state.model, int(self.state.step), "test")

    def train(self) -> None:
        config, strategy = self.run.config, self.run.strategy
        first = int(self.state.step)
        (is_evaluated, *_) = self._peers.gather(self._metrics.has(first, "valid"))
        if self._evaluation_due(first) and not is_evaluated:
            self._checkpoints.save(self.state, self._validate())  # which a stop had cut short
        if first >= config.steps:
            return
        horizon = config.optimizer.total_steps
        if config.optimizer.schedule != "inverse_square_root" and horizon is not None and horizon < config.steps:
            self._progress.note(f"note: the learning rate is zero from step {horizon:,} on (optimizer.total_steps)")
        if config.optimizer.warmup_steps > config.steps:
            self._progress.note(
                f"note: the learning rate still rises at the last step (optimizer.warmup_steps "
                f"{config.optimizer.warmup_steps:,})"
            )
        if config.profile is not None and config.profile[0] > config.steps:
            self._progress.note(f"note: there is no step {config.profile[0]:,} to profile")
        with self._watchdog.pause():
            batches, num_shapes = self._batches(first)
        train_step = make_train_step(
            self._loss,
            self.run.optimizer,
            accumulate=config.accumulate,
            axis_name=strategy.axis_name,
            skip_non_finite=config.non_finite == "skip",
        )
        self._step = strategy.compile(train_step, self.state)
        programs = Programs(self._step, self.run.task, num_shapes, self._progress, num_parts=self._num_parts)
        profile = StepProfile(config.profile, self.run.workdir.local / "profile")
        for step, batch in enumerate(batches, first + 1):
            with self._watchdog.pause():
                program, flops = programs(self.state, batch)  # compiled before it is asked whether to go on
            if not self._peers.may_step(step):
                self.save()
                raise Interrupted
            profile.before(step)
            with self._dispatching:
                self.state, metrics = program.run(self.state, batch)
                self._number = step
            if step % config.log_every == 0:  # before the next step is sent off, which reading it would wait for
                metrics["learning_rate"] = self._learning_rate(step - 1)
            self._recent.append((step, batch))
            if (folder := profile.after(step, metrics)) is not None:
                self._progress.note(f"trace of steps {config.profile[0]} to {step}: {folder}")  # type: ignore[index]
            self._read()
            self._unread = (step, metrics, flops)
            if self._evaluation_due(step) or step % config.save_every == 0:
                self._read()
                metrics_of_valid = self._validate() if self._evaluation_due(step) else None
                with self._watchdog.pause():
                    self._checkpoints.save(self.state, metrics_of_valid)
                self._throughput.restart()
            self._check()
        profile.stop()

    def _loss(self, model: Any, batch: Mapping[str, jax.Array], key: jax.Array | None) -> Loss:
        return self.run.task.loss(self.run.config.optimizer.without_frozen_gradients(model), batch, key)

    def _check(self) -> None:
        """Stop here if asked to. Several processes stop at a step that they agree on, and nowhere else."""
        if self._peers.count == 1:
            self._interrupt.check()

    def _validate(self) -> dict[str, float | str] | None:
        with self._watchdog.pause():
            return self._evaluate(self.state.model, int(self.state.step), "valid")

    def save(self) -> bool:
        """Save the newest state and wait until it is on disk; False in the middle of a step, which has taken it."""
        with self._dispatching, self._watchdog.pause():
            if self._step_to_save() is None:
                return False
            self._read()
            self._checkpoints.save(self.state)
            self._checkpoints.wait()
            return True

    def _step_to_save(self) -> int | None:
        """The step of the state; None in the middle of a step, which has taken it."""
        return None if any(x.is_deleted() for x in jax.tree.leaves(self.state)) else self._number

    @property
    def _num_parts(self) -> float:
        """How many times the batch of this process the whole batch is, where the step is given this process's rows."""
        indices, count = self.run.strategy.process_rows
        return 1.0 if self.run.strategy.axis_name is None else count / len(indices)

    def _evaluation_due(self, step: int) -> bool:
        return step > 0 and (step % self.run.config.evaluate_every == 0 or step == self.run.config.steps)

    def _batches(self, first: int) -> tuple[Iterator[Mapping[str, Any]], int]:
        """The batches from step `first` on, made and sent ahead of time, and the number of their shapes."""
        run, config = self.run, self.run.config
        examples = training_examples(run.workdir, config, run.task) if self._peers.index == 0 else None
        self._peers.barrier("examples")
        if examples is None:
            examples = training_examples(run.workdir, config, run.task)
        layout = run.task.layout(examples, training=True)
        multiple, shard = run.strategy.num_row_shards * config.accumulate, Shard(*run.strategy.process_rows)
        batches = self._order = Batches(layout, seed=config.seed, multiple=multiple, shard=shard)
        size = sum(leaf.size for leaf in jax.tree.leaves(self.state.model))
        facts = (f"{size:,} parameters", layout.describe(), run.task.describe(), f"{batches.per_epoch:,} batches")
        where = f"{run.strategy.describe()}; the first steps take long: they are compiled"
        self._progress.note("; ".join(filter(None, (*facts, where))))
        num_shapes = sum(bucket.num_rows > 0 for bucket in layout.buckets)
        return run.strategy.feed(ahead_of_time(batches, first, config.steps, config.workers)), num_shapes

    def _read(self) -> None:
        """Take in the metrics of the step before."""
        if self._unread is None:
            return
        (step, arrays, flops), self._unread = self._unread, None
        metrics = {name: float(value) for name, value in arrays.items()}
        self._watchdog.beat()
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["gradient_norm"])):
            self._not_finite(step, metrics)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            metrics = {"loss": math.nan, **finite, "skipped": 1.0}
        unit = self.run.task.unit
        metrics[unit] = metrics.pop("weight")
        self._throughput.add(metrics[unit], flops)
        speed = self._throughput.metrics()
        self._progress.update(step, metrics["loss"], speed[f"{unit}_per_second"])
        if step % self.run.config.log_every == 0:
            known = {name: value for name, value in (metrics | speed).items() if math.isfinite(value)}  # which JSON has
            self._metrics.write(step, "train", known)
            self._throughput.restart()

    def _state_before(self, step: int) -> TrainState:
        """The state that a step was given, computed again from the newest checkpoint: the step has taken it."""
        latest = self._checkpoints.latest()
        state = self.run.first_state()[0] if latest is None else self.run.restored_state(self._checkpoints)
        first = int(state.step)
        if first < step - 1:
            self._progress.note(f"going back to step {first:,} to find where step {step:,} is not finite")
        batches = ahead_of_time(self._order, first, step - 1, self.run.config.workers)
        for batch in self.run.strategy.feed(batches):
            state, _ = self._step(state, batch)
        return state

    def _not_finite(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the batch of a step whose numbers are not finite; then stop, or go on without it."""
        name = "loss" if not math.isfinite(metrics["loss"]) else "gradient_norm"
        batch = next(batch for number, batch in self._recent if number == step)
        process = f".{self._peers.index}" if self._peers.count > 1 else ""
        path = self.run.workdir.path / f"not_finite_{step}{process}.npz"
        self._num_skipped += 1
        if self.run.config.non_finite == "skip":
            if self._num_skipped > MOST_SKIPPED:
                raise UserError(
                    f"{self._num_skipped} steps were not finite, the last of them {step}; lower the learning rate, or "
                    "set optimizer.clip_norm"
                )
            kept = ""
            if self._num_skipped <= MOST_KEPT:
                kept = f", and its batch kept in {path}"
                with atomic(path) as unfinished:
                    keep_batch(batch, unfinished)
            self._progress.note(f"step {step:,}: the {name} is {metrics[name]}; skipped{kept}")
            return
        with atomic(path) as unfinished:
            keep_batch(batch, unfinished)
        with self._watchdog.pause():
            before = self._state_before(step)
            with self.run.strategy.context():
                whole = batch if self.run.strategy.axis_name is None else self.run.strategy.place(batch)
                place = first_non_finite(self._loss, before.model, whole)
        latest = self._checkpoints.latest()
        saved = "there is no checkpoint yet" if latest is None else f"the newest checkpoint is of step {latest:,}"
        raise UserError(
            f"the {name} became {metrics[name]} at step {step}: first in {place}. The batch is kept in {path}; "
            f"{saved}. Lower the learning rate, set "
            "optimizer.clip_norm, or go on without such batches with --non-finite skip"
        )
