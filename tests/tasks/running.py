"""A task's model on one device: its metrics, what it writes, and how it learns."""

from dataclasses import replace

import jax
import optax
from flax import nnx

from transformer_jax.data import Batches, BatchingConfig, Store, TokenizerConfig
from transformer_jax.models import BertConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import Predictor
from transformer_jax.training import TrainState, make_train_step

ONE = Strategy.choose(devices=jax.devices()[:1])


def store_of(task, records):
    return Store.of(task.encode(records), task.columns)


def evaluate(task, model, records, strategy=ONE, *, limit=None, **settings):
    predictor = Predictor(task, model, strategy, **settings)
    return predictor.evaluate(records, examples=store_of(task, records), limit=limit)


def write(task, model, texts, strategy=ONE):
    return task.write(texts, Predictor(task, model, strategy))


def fit(task, model, records, *, steps=30, rate=1e-2):
    """The model after some steps of Adam, and the loss of each."""
    optimizer = optax.adam(rate)
    step = jax.jit(make_train_step(task.loss, optimizer))
    state = TrainState.create(model, optimizer, jax.random.key(0))
    batches = Batches(task.layout(store_of(task, records), training=True))
    losses = []
    for number in range(steps):
        state, metrics = step(state, batches[number])
        losses.append(float(metrics["loss"]))
    return state.model, losses


def tiny_bert(task_config, records, *, max_length=24, rows=8, kind="characters"):
    """A task with a tokenizer of its records and a model for it."""
    processor = TokenizerConfig(kind=kind, vocab_size=300)
    tokenizer = processor.learn(records, (*task_config.text_fields, *task_config.word_fields))
    config = replace(
        BertConfig.base(tokenizer.vocab_size, pad_id=tokenizer.pad_id),
        d_model=16,
        num_heads=2,
        d_ff=24,
        num_layers=1,
        max_length=max_length,
        dtype="float32",
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    config = task_config.adapt(config, records)
    return task_config.build(tokenizer, config, BatchingConfig(rows=rows)), jax.jit(lambda: config.build(nnx.Rngs(0)))()
