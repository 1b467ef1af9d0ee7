"""A training step of configs/gpt_text.py here and in torch, turn by turn in one run: `python benchmarks/gpt_step.py`.

The size of nanoGPT's recipe for a CPU: 4 layers, 4 heads, d 128, 12 rows of 64 characters, AdamW with decay and
clipping, float32. Torch is written as nanoGPT is (fused attention, fused AdamW) and runs in a process of its own, once
as it comes and once with our settings of the C allocator. A turn is several steps. Needs the extra [bench]. Use a
machine that does nothing else.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection

from side_by_side import answer, in_process, print_ratio, seconds, take_turns

VOCAB, D_MODEL, LAYERS, HEADS, ROWS, LENGTH = 69, 128, 4, 4, 12, 64
STEPS = 20  # of a turn


def make_jax_step() -> Callable[[], None]:
    """Steps of ours, as `train.py configs/gpt_text.py` makes them; returns when they are done."""
    import runpy
    from dataclasses import replace
    from pathlib import Path

    import jax
    import numpy as np
    from flax import nnx

    from transformer_jax.functional import cross_entropy
    from transformer_jax.training import TrainState, make_train_step

    config = runpy.run_path(str(Path(__file__).parent.parent / "configs" / "gpt_text.py"))["config"]
    optimizer = replace(config.optimizer, total_steps=config.steps).build(D_MODEL)

    def loss(model, batch, key):
        logits = model(batch["text"][:, :-1], segments=batch["segments"][:, :-1], dropout_key=key)
        return cross_entropy(logits, batch["text"][:, 1:], batch["segments"][:, 1:] > 0)

    step = jax.jit(make_train_step(loss, optimizer), donate_argnums=0)
    model = replace(config.model, vocab_size=VOCAB, dtype="float32").build(nnx.Rngs(0))
    state = TrainState.create(model, optimizer, jax.random.key(0))
    batch = {
        "text": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32),
        "segments": np.ones((ROWS, LENGTH + 1), np.int32),
        "slot": np.arange(ROWS, dtype=np.int32),
    }

    def run() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    return run


def torch_worker(connection: Connection, prepared: bool) -> None:
    """Steps of torch's."""
    import torch
    from torch import nn
    from torch.nn import functional

    from transformer_jax.parallel import prepare_host

    if prepared:
        prepare_host()
    torch.set_num_threads(os.cpu_count() or 1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
            self.project, self.output = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
            self.inward, self.outward = nn.Linear(D_MODEL, 4 * D_MODEL), nn.Linear(4 * D_MODEL, D_MODEL)

        def forward(self, x):
            heads = self.project(self.first(x)).view(ROWS, LENGTH, 3, HEADS, D_MODEL // HEADS)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.output(y.transpose(1, 2).reshape(ROWS, LENGTH, D_MODEL))
            return x + self.outward(functional.gelu(self.inward(self.second(x)), approximate="tanh"))

    tokens, positions = nn.Embedding(VOCAB, D_MODEL), nn.Embedding(LENGTH, D_MODEL)
    model = nn.ModuleList([tokens, positions, nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(D_MODEL)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1))

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            x = model[3](model[2](tokens(ids[:, :-1]) + positions.weight))
            logits = functional.linear(x, tokens.weight)
            functional.cross_entropy(logits.view(-1, VOCAB), ids[:, 1:].reshape(-1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    answer(connection, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default: 20)")
    rounds = parser.parse_args().rounds
    from transformer_jax.parallel import prepare_host

    prepare_host()
    step = make_jax_step()
    runners: dict[str, Callable[[], float]] = {
        "transformer_jax": lambda: seconds(step),
        "torch": in_process(torch_worker, False),
        "torch, our allocator": in_process(torch_worker, True),
    }
    times = take_turns(runners, rounds)
    for name, spent in times.items():
        median = statistics.median(spent) / STEPS
        print(f"{name:20} {median * 1e3:6.1f} ms a step  {ROWS * LENGTH / median:7,.0f} tokens/s")
    for name in list(runners)[1:]:
        print_ratio(times, name)


if __name__ == "__main__":
    main()
