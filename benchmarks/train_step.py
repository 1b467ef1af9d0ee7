"""The same training step here and in torch, turn by turn in one run: `python benchmarks/train_step.py`.

An encoder-decoder of 3 + 3 post-norm layers, d 256, feed-forward 1,024, 4 heads, a tied vocabulary of 8,000; batches of
64 pairs of 32 tokens; dropout 0.1 wherever torch's nn.Transformer drops; label smoothing 0.1; Adam; float32. Torch is
given its fused Adam and runs in a process of its own, so that neither's threads wait on the other's; once as it comes,
and once with the settings of the C allocator that our commands make for themselves (`parallel.prepare_host`). Needs the
extra [bench]. Use a machine that does nothing else.
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

from side_by_side import answer, in_process, print_ratio, seconds, take_turns

VOCAB, D_MODEL, LAYERS, HEADS, D_FF, ROWS, LENGTH = 8_000, 256, 3, 4, 1_024, 64, 32
DROPOUT, SMOOTHING, PAD, MATMUL = 0.1, 0.1, 0, 2_048


def flops_per_step() -> float:
    """Multiplications and additions of a step: three times those of the forward pass."""
    tokens = ROWS * LENGTH
    projection, feed_forward = 2 * D_MODEL * D_MODEL, 2 * 2 * D_MODEL * D_FF
    attention = 2 * 2 * LENGTH * D_MODEL
    encoder = LAYERS * (4 * projection + attention + feed_forward)
    decoder = LAYERS * (8 * projection + 2 * attention + feed_forward)
    return 3 * tokens * (encoder + decoder + 2 * D_MODEL * VOCAB)


def make_jax_step() -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of ours that returns when it is done, and a large matrix product."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from transformer_jax.functional import cross_entropy
    from transformer_jax.models import Transformer, TransformerConfig
    from transformer_jax.training import TrainState, make_train_step

    config = replace(
        TransformerConfig.base(VOCAB, pad_id=PAD),
        d_model=D_MODEL,
        num_heads=HEADS,
        d_ff=D_FF,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        dropout_rate=DROPOUT,
        attention_dropout_rate=DROPOUT,
        activation_dropout_rate=DROPOUT,
        dtype="float32",
    )
    optimizer = optax.adam(1e-4, b1=0.9, b2=0.98, eps=1e-9)

    def loss(model, batch, key):
        logits = model(batch["source"], batch["target"][:, :-1], dropout_key=key)
        labels = batch["target"][:, 1:]
        return cross_entropy(logits, labels, labels != PAD, label_smoothing=SMOOTHING)

    step = jax.jit(make_train_step(loss, optimizer), donate_argnums=0)
    model = Transformer(config, rngs=nnx.Rngs(0))
    state = TrainState.create(model, optimizer, jax.random.key(0))
    random = np.random.default_rng(0)
    batch = {
        "source": random.integers(1, VOCAB, (ROWS, LENGTH), np.int32),
        "target": random.integers(1, VOCAB, (ROWS, LENGTH + 1), np.int32),
        "slot": np.arange(ROWS, dtype=np.int32),
    }

    def run() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)

    square = jnp.ones((MATMUL, MATMUL))
    product = jax.jit(jnp.matmul)
    return run, lambda: jax.block_until_ready(product(square, square))


def torch_worker(connection: Connection, prepared: bool) -> None:
    """Run a step of torch's and send its seconds, for each message."""
    import torch
    from torch import nn

    from transformer_jax.parallel import prepare_host

    if prepared:
        prepare_host()
    torch.set_num_threads(os.cpu_count() or 1)
    embedding = nn.Embedding(VOCAB, D_MODEL)
    nn.init.normal_(embedding.weight, std=D_MODEL**-0.5)
    transformer = nn.Transformer(D_MODEL, HEADS, LAYERS, LAYERS, D_FF, DROPOUT, batch_first=True).train()
    dropout = nn.Dropout(DROPOUT)
    angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, D_MODEL, 2) / D_MODEL)
    positions = torch.stack([angles.sin(), angles.cos()], -1).reshape(LENGTH, D_MODEL)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    parameters = [*embedding.parameters(), *transformer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    loss = nn.CrossEntropyLoss(label_smoothing=SMOOTHING, ignore_index=PAD)
    source, target, labels = (torch.randint(1, VOCAB, (ROWS, LENGTH)) for _ in range(3))

    def embed(ids):
        return dropout(embedding(ids) * math.sqrt(D_MODEL) + positions)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        x = transformer(
            embed(source),
            embed(target),
            tgt_mask=future,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        loss(nn.functional.linear(x, embedding.weight).view(-1, VOCAB), labels.view(-1)).backward()
        optimizer.step()

    answer(connection, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (default: 20)")
    rounds = parser.parse_args().rounds
    from transformer_jax.parallel import prepare_host

    prepare_host()
    step, product = make_jax_step()
    runners: dict[str, Callable[[], float]] = {
        "transformer_jax": lambda: seconds(step),
        "torch": in_process(torch_worker, False),
        "torch, our allocator": in_process(torch_worker, True),
        "matmul": lambda: seconds(product),
    }
    times = take_turns(runners, rounds)
    peak = 2 * MATMUL**3 / min(times["matmul"])
    print(f"float32 matmul peak of this run: {peak / 1e9:.0f} GFLOP/s")
    for name in list(runners)[:3]:
        median = statistics.median(times[name])
        share = flops_per_step() / median / peak
        print(
            f"{name:20} {median * 1e3:6.0f} ms a step  {2 * ROWS * LENGTH / median:7,.0f} tokens/s  {share:.2f} of peak"
        )
    for name in list(runners)[1:3]:
        print_ratio(times, name)


if __name__ == "__main__":
    main()
