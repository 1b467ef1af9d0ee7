"""The evaluation of a run on its splits: what is evaluated on, and where the metrics go."""

from collections.abc import Callable
from typing import Any

from transformer_jax.data import Split
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers
from transformer_jax.tasks.predictor import num_rows
from transformer_jax.training.examples import EncodedSplit, encode_split, validation_examples
from transformer_jax.training.metrics import MetricsLog, describe
from transformer_jax.training.progress import ProgressLine
from transformer_jax.training.run import Run


class Evaluation:
    """Evaluates a model of a run on a split, shows the metrics and writes them down."""

    def __init__(self, run: Run, metrics: MetricsLog, progress: ProgressLine, peers: Peers, check: Callable[[], None]):
        self._run, self._metrics, self._progress, self._peers, self._check = run, metrics, progress, peers, check
        self._valid: EncodedSplit | None = None

    def __call__(self, model: Any, step: int, split: Split) -> dict[str, float | str] | None:
        """The metrics of a split; None when it is empty. `check` is called after each batch, and may raise to stop."""
        run, task = self._run, self._run.task
        if split == "valid" and self._valid is None:
            if self._peers.index == 0:
                self._valid = validation_examples(run.workdir, run.config, task)
            self._peers.barrier("validation examples")
            self._valid = self._valid or validation_examples(run.workdir, run.config, task)
        encoded = self._valid if split == "valid" else encode_split(run.config, task, split)
        if encoded is None or not len(encoded.records):
            if split == "valid":
                self._progress.note("there are no validation records: nothing is evaluated during the training")
            return None
        layout = task.layout(encoded.examples, training=False)
        if not num_rows(layout):
            self._progress.note(f"step {step:,}  {split}: too short to evaluate on; it makes no row")
            return None
        limit = run.config.evaluate_examples if split == "valid" else None
        with self._progress.subtask(f"{split} split", num_rows(layout, limit)) as tick:

            def tick_and_check(num_rows: int) -> None:
                tick(num_rows)
                self._check()

            predictor = run.predictor(model, tick=tick_and_check)
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
