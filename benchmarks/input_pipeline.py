"""How fast batches are made, beside how fast the default model consumes them, in one run.

`python benchmarks/input_pipeline.py` takes the default config; give another, with its flags, as to train.py. Tokens are
counted without padding, on both sides of a pair. The turns of pipeline and model alternate.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

TURNS, BATCHES_A_TURN, STEPS_A_TURN = 8, 200, 10


def main() -> None:
    from transformer_jax.commands.errors import user_errors
    from transformer_jax.parallel import prepare_host

    prepare_host()
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "run")


def measure(workdir: Path) -> None:
    from transformer_jax.commands.train import parse_config
    from transformer_jax.data import Batches
    from transformer_jax.training import Run, make_train_step
    from transformer_jax.training.examples import training_examples
    from transformer_jax.training.prefetch import ahead_of_time

    config = replace(parse_config(sys.argv[1:], "input_pipeline.py"), workdir=workdir)
    start = time.perf_counter()
    run = Run.begin(config)
    trained = time.perf_counter()
    examples = training_examples(run.workdir, run.config, run.task)
    tokens = int(examples.lengths.sum())
    encoded = time.perf_counter() - trained
    layout = run.task.layout(examples, training=True)
    batches = Batches(layout, seed=config.seed, multiple=run.strategy.num_row_shards)
    print(f"tokenizer in {trained - start:.1f} s; {len(examples):,} examples read and encoded in {encoded:.1f} s")
    shapes = len(layout.buckets)
    print(f"{tokens:,} tokens in {batches.per_epoch:,} batches of {shapes} shapes, {layout.padding:.1%} padding")

    state, _ = run.first_state()
    step = run.strategy.compile(make_train_step(run.task.loss, run.optimizer, axis_name=run.strategy.axis_name), state)
    fed = ahead_of_time(batches, 0, 10**9, config.workers)
    consumed = ahead_of_time(batches, 0, 10**9, config.workers)
    for batch in islice(consumed, 3 * len(layout.buckets)):  # until every shape is compiled
        state, metrics = step(state, batch)
    float(metrics["loss"])

    speeds: dict[str, list[float]] = {"pipeline": [], "model": []}
    for _ in range(TURNS):
        start, count = time.perf_counter(), 0
        for batch in islice(fed, BATCHES_A_TURN):
            count += real_tokens(batch, run.processor.pad_id)
        speeds["pipeline"].append(count / (time.perf_counter() - start))
        start, count = time.perf_counter(), 0
        for batch in islice(consumed, STEPS_A_TURN):
            state, metrics = step(state, batch)
            count += real_tokens(batch, run.processor.pad_id)
        float(metrics["loss"])
        speeds["model"].append(count / (time.perf_counter() - start))
    for name, turns in speeds.items():
        print(f"{name:8} {statistics.median(turns):12,.0f} tokens/s (lowest turn {min(turns):,.0f})")
    ratios = sorted(a / b for a, b in zip(speeds["pipeline"], speeds["model"], strict=True))
    print(f"the pipeline is {statistics.median(ratios):.0f} times as fast as the model (lowest turn {ratios[0]:.0f})")


def real_tokens(batch: dict[str, np.ndarray], pad_id: int) -> int:
    return sum(int((batch[name] != pad_id).sum()) for name in ("source", "target"))


if __name__ == "__main__":
    main()
