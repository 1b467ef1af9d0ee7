"""The smallest model that shows everything, and batches for it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.models import Transformer, TransformerConfig

PAD, BEGIN, END, VOCAB = 1, 2, 3, 12

CONFIG = replace(
    TransformerConfig.base(VOCAB, pad_id=PAD),
    d_model=16,
    num_heads=2,
    d_ff=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=24,
    dtype="float32",
)


def make(config=CONFIG, seed=0):
    return jax.jit(lambda: Transformer(config, rngs=nnx.Rngs(seed)))()


forward = jax.jit(Transformer.__call__)
start = partial(jax.jit, static_argnames="length")(Transformer.start)
decode = jax.jit(Transformer.decode)


def pairs(rows=4, source_length=6, target_length=5, seed=0):
    """Ragged ids: row r of the source is shorter by r, of the target by r // 2."""
    random = np.random.default_rng(seed)
    source = random.integers(4, VOCAB, (rows, source_length))
    target = random.integers(4, VOCAB, (rows, target_length))
    target[:, 0] = BEGIN
    for row in range(rows):
        source[row, max(source_length - row, 1) :] = PAD
        target[row, max(target_length - row // 2, 2) :] = PAD
    return jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
