"""What `train.py` does with a config: train, then show what came of it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from transformer_jax.commands.attention import draw_attention
from transformer_jax.data import Record
from transformer_jax.models import Transformer
from transformer_jax.training import Config, Run, train

NUM_SAMPLES = 8
READABLE = 120  # characters of a text whose tokens can still be told apart on the axes of a picture


def train_and_show(config: Config) -> None:
    """Train, then print sample translations of the test split and draw the attention of the longest."""
    run, state = train(config)
    samples = _samples(run)
    if samples:
        _print_samples(run, state.model, samples)
        readable = [sample["source"] for sample in samples if len(sample["source"]) <= READABLE] or [""]
        if longest := max(readable, key=len):
            picture = run.workdir.path / "attention.png"
            draw_attention(run, state.model, longest, picture)
            print(f"attention picture: {picture}")
    print(f"run: {run.workdir.path} (config, metrics, checkpoints; the same command goes on from here)")


def _samples(run: Run) -> list[Record]:
    """The first records of the test split that the model can read; of the validation split where there is none."""
    records = run.config.data.split("test") or run.config.data.split("valid")
    first = [records[i] for i in range(min(4 * NUM_SAMPLES, len(records)))]
    faults = run.task.faults([record["source"] for record in first])
    return [record for record, fault in zip(first, faults, strict=True) if not fault][:NUM_SAMPLES]


def _print_samples(run: Run, model: Transformer, samples: Sequence[Record]) -> None:
    outputs = run.task.translate(model, [sample["source"] for sample in samples], run.strategy)
    table = Table("source", "model", "reference", "", title="held-out samples")
    for sample, output in zip(samples, outputs, strict=True):
        table.add_row(sample["source"], output, sample["target"], "✓" if output == sample["target"] else "✗")
    Console(highlight=False).print(table, markup=False)
