"""Memory of training steps on one TPU chip, by its compiler, which needs no TPU: `python benchmarks/tpu_memory.py`.

The 2017 big model here and in Flax Linen, with the same sizes: 64 pairs of 128 tokens, a shared vocabulary of 37,000,
bfloat16, dropout 0.1 of embeddings, sub-layers, attention weights and activations, label smoothing 0.1, Adam, a donated
state. The Linen model is one of our own after the wmt example of Flax: norms before the sub-layers, layers written out,
logits and smoothed targets of the whole vocabulary in float32. Then other models of ours with 8,192 tokens. Figures are
of a v5e, as compiled: nothing is run. Needs the extra [tpu], and that no other process uses its library.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

VOCAB, D_MODEL, LAYERS, HEADS, D_FF, ROWS, LENGTH = 37_000, 1_024, 6, 16, 4_096, 64, 128
DROPOUT, SMOOTHING = 0.1, 0.1
LEARNING_RATE = 1e-4
NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class Step(NamedTuple):
    """A train step, and the shapes that it is compiled for."""

    function: Callable[[Any, Any], Any]
    state: Any
    batch: dict[str, tuple[int, ...]]
    """The shape of each array of ids."""


def our_step(config: Any, batch: dict[str, tuple[int, ...]], loss: Callable[..., Any]) -> Step:
    """A step of ours for a model of this config."""
    import jax
    import optax
    from flax import nnx

    from transformer_jax.training import TrainState, make_train_step

    optimizer = optax.adam(LEARNING_RATE)
    build = lambda: TrainState.create(config.build(nnx.Rngs(0)), optimizer, jax.random.key(0))  # noqa: E731
    rows = {"slot": next(iter(batch.values()))[:1]}
    return Step(make_train_step(loss, optimizer), jax.eval_shape(build), batch | rows)


def big() -> Step:
    """The 2017 big model."""
    from transformer_jax.functional import chunked_cross_entropy
    from transformer_jax.models import TransformerConfig

    def loss(model, batch, key):
        labels = batch["target"][:, 1:]
        x, _ = model.hidden_and_balance(batch["source"], batch["target"][:, :-1], dropout_key=key)
        return chunked_cross_entropy(x, model.logits, labels, labels != 0, label_smoothing=SMOOTHING)

    config = replace(
        TransformerConfig.big(VOCAB),
        dropout_rate=DROPOUT,
        attention_dropout_rate=DROPOUT,
        activation_dropout_rate=DROPOUT,
        dtype="bfloat16",
    )
    return our_step(config, {"source": (ROWS, LENGTH), "target": (ROWS, LENGTH + 1)}, loss)


def gpt() -> Step:
    """GPT-2 small with 8 rows of 1,024 tokens."""
    from transformer_jax.functional import chunked_cross_entropy
    from transformer_jax.models import GPTConfig

    def loss(model, batch, key):
        labels = batch["text"][:, 1:]
        x, _ = model.hidden_and_balance(batch["text"][:, :-1], dropout_key=key)
        return chunked_cross_entropy(x, model.logits, labels, labels >= 0)

    return our_step(replace(GPTConfig.small(), dtype="bfloat16"), {"text": (8, 1_025)}, loss)


def bert() -> Step:
    """BERT base with 16 rows of 512 tokens, of which 77 are predicted."""
    import jax.numpy as jnp

    from transformer_jax.functional import chunked_cross_entropy
    from transformer_jax.models import BertConfig

    def loss(model, batch, key):
        x = model(batch["ids"], dropout_key=key)
        masked = jnp.take_along_axis(x, batch["positions"][..., None], axis=1)
        return chunked_cross_entropy(masked, model.masked_lm, batch["labels"], batch["labels"] >= 0)

    config = replace(BertConfig.base(), heads=("masked_lm",), dtype="bfloat16")
    return our_step(config, {"ids": (16, 512), "positions": (16, 77), "labels": (16, 77)}, loss)


def t5() -> Step:
    """T5 base with 16 sources and targets of 512 tokens."""
    from transformer_jax.functional import chunked_cross_entropy
    from transformer_jax.models import T5Config

    def loss(model, batch, key):
        labels = batch["target"][:, 1:]
        x, _ = model.hidden_and_balance(batch["source"], batch["target"][:, :-1], dropout_key=key)
        return chunked_cross_entropy(x, model.logits, labels, labels != 0)

    return our_step(replace(T5Config.base(), dtype="bfloat16"), {"source": (16, 512), "target": (16, 513)}, loss)


def linen() -> Step:
    """The big model in Linen, after the wmt example of Flax."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    from transformer_jax.functional import sinusoidal

    def norm(x):
        return nn.LayerNorm(dtype=jnp.bfloat16)(x)

    def drop(x):
        return nn.Dropout(DROPOUT, deterministic=False)(x)

    def attend(x, memory, mask):
        attention = nn.MultiHeadDotProductAttention(
            HEADS,
            dtype=jnp.bfloat16,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=DROPOUT,
            deterministic=False,
        )
        return drop(attention(x, memory, mask=mask))

    def feed_forward(x):
        hidden = drop(nn.relu(nn.Dense(D_FF, dtype=jnp.bfloat16)(x)))
        return drop(nn.Dense(D_MODEL, dtype=jnp.bfloat16)(hidden))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, mask, memory=None, memory_mask=None):
            y = norm(x)
            x = x + attend(y, y, mask)
            if memory is not None:
                x = x + attend(norm(x), memory, memory_mask)
            return x + feed_forward(norm(x))

    class Peer(nn.Module):
        @nn.compact
        def __call__(self, source, target):
            table = nn.Embed(VOCAB, D_MODEL)

            def embed(ids):
                positions = sinusoidal(jnp.arange(ids.shape[1]), D_MODEL)[None]
                return drop(table(ids) + positions).astype(jnp.bfloat16)

            def mask(queries, keys):
                return nn.make_attention_mask(queries > 0, keys > 0, dtype=jnp.bfloat16)

            x = embed(source)
            for _ in range(LAYERS):
                x = Layer()(x, mask(source, source))
            memory, y = norm(x), embed(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
            causal = nn.combine_masks(mask(target, target), nn.make_causal_mask(target, dtype=jnp.bfloat16))
            for _ in range(LAYERS):
                y = Layer()(y, causal, memory, mask(target, source))
            return table.attend(norm(y).astype(jnp.float32)) / D_MODEL**0.5

    peer, optimizer = Peer(), optax.adam(LEARNING_RATE)

    def create():
        ids = jnp.ones((1, LENGTH), jnp.int32)
        parameters = peer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ids, ids)
        return parameters, optimizer.init(parameters), jnp.int32(0)

    def train_step(state, batch):
        parameters, moments, step = state
        weights = (batch["target"] > 0).astype(jnp.float32)

        def loss(parameters):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(0), step)}
            logits = peer.apply(parameters, batch["source"], batch["target"], rngs=rngs)
            is_label = batch["target"][..., None] == jnp.arange(VOCAB)
            smoothed = jnp.where(is_label, 1 - SMOOTHING, SMOOTHING / (VOCAB - 1))
            losses = -jnp.sum(smoothed * jax.nn.log_softmax(logits), axis=-1)
            return jnp.sum(losses * weights) / jnp.sum(weights)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments, step + 1), value

    return Step(train_step, jax.eval_shape(create), {"source": (ROWS, LENGTH), "target": (ROWS, LENGTH)})


STEPS: dict[str, Callable[[], Step]] = {"big": big, "linen": linen, "gpt": gpt, "bert": bert, "t5": t5}
PEERS = {"big": "linen"}


def memory(step: Step) -> dict[str, float]:
    """Megabytes of a step on one chip, by the compiler."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    on_chip = NamedSharding(Mesh(np.array(topology.devices[:1]), ("data",)), PartitionSpec())

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip)

    state = jax.tree.map(placed, step.state)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_chip) for name, shape in step.batch.items()}
    found = jax.jit(step.function, donate_argnums=0).lower(state, batch).compile().memory_analysis()
    sizes = {
        "peak": found.peak_memory_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes,
    }
    return {name: size / 1e6 for name, size in sizes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, []], help=f"which of {', '.join(STEPS)} (default: all)")
    names = parser.parse_args().steps or [*STEPS]
    os.environ.update(NO_TPU)
    found = {name: memory(STEPS[name]()) for name in names}
    width = max(len(STEPS[name].__doc__ or "") for name in names)
    print(f"{'megabytes on one v5e chip':{width}}  {'peak':>8} {'temporaries':>12} {'arguments':>10}")
    for name, sizes in found.items():
        peak, temporaries, arguments = sizes.values()
        print(f"{STEPS[name].__doc__:{width}}  {peak:8,.0f} {temporaries:12,.0f} {arguments:10,.0f}")
    for ours, peer in PEERS.items():
        if {ours, peer} <= {*found}:
            ratios = (f"{kind} {found[ours][kind] / found[peer][kind]:.2f}" for kind in ("peak", "temporaries"))
            print(f"{ours} relative to {peer}: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
