"""Running a trained model over many examples: compiled, in batches of a few shapes, on all devices, in order."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from transformer_jax.data.batches import Batches, Layout, Shard
from transformer_jax.data.columns import Column, Example
from transformer_jax.data.rows import Rows
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.task import LossTerm, Metrics, Results, Task, loss_terms, mean_loss

Function = Callable[[Any, Any, Mapping[str, Array]], dict[str, Array]]
"""(task, model, batch) to arrays with a leading row axis, such as `Translation.predict`."""

Predictions = Mapping[str, list[np.ndarray]]


def no_tick(num_rows: int) -> None:
    """Take no notice of progress."""


@dataclass(frozen=True)
class Predictor:
    """A model that is ready to be run over examples."""

    task: Task
    model: Any
    strategy: Strategy
    tick: Callable[[int], None] = no_tick
    """Called after each batch with the number of its rows; may raise to stop."""

    def __call__(self, function: Function, layout: Layout, *, limit: int | None = None) -> Predictions:
        """What a function gives for each row: by example where a row is one, else in the order of the rows.

        Args:
            function: is compiled once for each shape of a batch.
            layout: the rows.
            limit: of more rows than this, so many, evenly spaced.
        """
        return _in_order(layout, self._run(function, layout, limit))

    def over(
        self,
        function: Function,
        examples: Sequence[Example],
        columns: Mapping[str, Column] | None = None,
        *,
        max_length: int | None = None,
        batch_rows: int | None = None,
    ) -> Predictions:
        """What a function gives for each example.

        Args:
            function: is compiled once for each shape of a batch.
            examples: have some columns of the task, in rows as its `layout` says, or columns of their own:
            columns: are given with `max_length`, and come in `batching.num_buckets` shapes.
            max_length: most items of an example.
            batch_rows: rows of a batch for each device, where a function gives too much for many.
        """
        if columns is None or max_length is None:
            return self(function, self.task.layout(Store.of(examples, self.task.columns), training=False))
        batching = replace(self.task.batching, pack_length=None)
        if batch_rows is not None:
            batching = replace(batching, rows=batch_rows)
        limits, width = dict.fromkeys(columns, max_length), -(-max_length // batching.num_buckets)
        return self(function, Rows(Store.of(examples, columns), batching, max_lengths=limits, width_multiple=width))

    def evaluate(self, records: Sequence[Any], *, examples: Store | None = None, limit: int | None = None) -> Metrics:
        """The loss, the means of its terms, and the task's own metrics, over every record once.

        Args:
            records: what to evaluate on, such as `[{"text": "a great film", "label": "good"}]`.
            examples: what the records were encoded to; they are encoded now by default.
            limit: where rows are not examples, most rows to evaluate on, evenly spaced.
        """
        if examples is None:
            examples = Store.of(self.task.encode(records), self.task.columns)
        layout = self.task.layout(examples, training=False)
        if not num_rows(layout):
            raise UserError(f"there is nothing to evaluate {type(self.task).__name__} on; give more or longer records")
        terms: dict[str, LossTerm] = {}

        def predictions() -> Iterator[tuple[np.ndarray, Mapping[str, np.ndarray]]]:
            for rows, outputs in self._run(_predict_with_loss, layout, limit if layout.members is None else None):
                for name, (total, weight, factor) in outputs["terms"].items():
                    before = terms.get(name, LossTerm(0.0, 0.0))  # type: ignore[arg-type]
                    terms[name] = LossTerm(before.total + float(total), before.weight + float(weight), float(factor))
                yield rows, outputs["predictions"]

        predicted = {name: _stacked(values) for name, values in _in_order(layout, predictions()).items()}
        means = mean_loss(terms)
        return means | self.task.score(Results(means, predicted, examples, records))

    def _run(self, function: Callable[..., Any], layout: Layout, limit: int | None) -> Iterator[tuple[np.ndarray, Any]]:
        """The rows of each batch and what a function gives for it, read after the next batch has been sent off."""
        compiled, unread = _compiled(function, self.strategy), None
        if not any(bucket.num_rows for bucket in layout.buckets):
            return
        shard = Shard(*self.strategy.process_rows)
        for rows, batch in Batches(layout, multiple=self.strategy.num_row_shards, shard=shard).once(limit):
            outputs = compiled(self.task, self.model, self.strategy.place(batch))
            if unread is not None:
                yield self._read(*unread)
            unread = rows, outputs
        if unread is not None:
            yield self._read(*unread)

    def _read(self, rows: np.ndarray, outputs: Any) -> tuple[np.ndarray, Any]:
        arrays = jax.tree.map(np.asarray, outputs)
        self.tick(len(rows))
        return rows, arrays


def num_rows(layout: Layout, limit: int | None = None) -> int:
    """How many rows an evaluation goes over."""
    total = sum(bucket.num_rows for bucket in layout.buckets)
    return total if limit is None or layout.members is not None else min(total, limit)


def _in_order(layout: Layout, outputs: Iterator[tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> Predictions:
    found: dict[int, dict[str, np.ndarray]] = {}
    for rows, arrays in outputs:
        for position, row in enumerate(rows):
            found[int(row)] = {name: array[position] for name, array in arrays.items()}
    members = layout.members
    predictions: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for row in sorted(found, key=lambda row: row if members is None else int(members[row])):
        for name, value in found[row].items():
            predictions[name].append(value)
    return predictions


def _stacked(values: list[np.ndarray]) -> Any:
    """One array, if they have the same shape."""
    return np.stack(values) if len({value.shape for value in values}) == 1 else values


@cache
def _compiled(function: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """What it gives is on every device, so that every process can read it."""
    return strategy.jit(function, static_argnums=0, out_shardings=strategy.replicated)


def _predict_with_loss(task: Task, model: Any, batch: Mapping[str, Array]) -> dict[str, Any]:
    return {"terms": loss_terms(task.loss(model, batch, None)), "predictions": task.predict(model, batch)}
