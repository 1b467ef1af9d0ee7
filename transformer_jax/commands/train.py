"""What `train.py` does with a config: train, then show what came of it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from transformer_jax.commands.attention import draw_attention
from transformer_jax.training import Config, Run, train

NUM_SAMPLES = 8
SHOWN = 240  # characters of a text in the table
READABLE = 120  # characters of a text whose tokens can still be told apart on the axes of a picture


def train_and_show(config: Config) -> None:
    """Train, then print samples of the test split and draw the attention of the longest."""
    run, state = train(config)
    samples = _samples(run, state.model)
    if samples:
        _print(samples)
        inputs = [next(iter(sample.values())) for sample in samples]
        readable = [text for text in inputs if len(text) <= READABLE] or [min(inputs, key=len)[:READABLE]]
        picture = run.workdir.path / "attention.png"
        draw_attention(run, state.model, max(readable, key=len), picture)
        print(f"attention picture: {picture}")
    print(f"run: {run.workdir.path} (config, metrics, checkpoints; the same command goes on from here)")


def _samples(run: Run, model: Any) -> list[dict[str, str]]:
    """What the model makes of the first records of the test split; of the validation split where there is none."""
    records = run.config.data.split("test") or run.config.data.split("valid")
    first = [records[i] for i in range(min(4 * NUM_SAMPLES, len(records)))]
    with run.precision():
        return run.task.samples(model, first, run.strategy)[:NUM_SAMPLES] if first else []


def _print(samples: list[dict[str, str]]) -> None:
    table = Table(*samples[0], title="held-out samples", show_lines=any("\n" in text for text in samples[0].values()))
    for sample in samples:
        table.add_row(*(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…" for text in sample.values()))
    Console(highlight=False).print(table, markup=False)
