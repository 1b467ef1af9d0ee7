"""What all pre-training tasks have in common: batches are functions of (seed, step, slot), metrics of data alone."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import ONE, evaluate, store_of
from transformer_jax.data import Batches, BatchingConfig, Shard, Tokenizer, TokenizerConfig
from transformer_jax.models import BertConfig, GPTConfig, T5Config, XLNetConfig
from transformer_jax.tasks import CausalLMConfig, DenoisingConfig, MaskedLMConfig, PermutationLMConfig, Predictor
from transformer_jax.tasks.task import loss_terms, mean_loss

TEXTS = [
    "\n".join(f"{animal} number {n} {verb} over the fence." for verb in ("jumps", "flies", "looks") for n in range(2))
    for animal in ("The fox", "A crow", "One cat", "Das Pferd", "狐")
]
RECORDS = [{"text": text} for text in TEXTS]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "dtype": "float32"}
LENGTH = 24

TASKS = {
    "causal": (CausalLMConfig(), GPTConfig.small(None), {"num_layers": 1}),
    "stream": (CausalLMConfig(separate=False), GPTConfig.small(None), {"num_layers": 1}),
    "masked": (MaskedLMConfig(), BertConfig.base(None), {"num_layers": 1}),
    "whole words": (MaskedLMConfig(whole_words=True, next_sentence=False), BertConfig.base(None), {"num_layers": 1}),
    "denoising": (DenoisingConfig(), T5Config.small(None), {"num_encoder_layers": 1, "num_decoder_layers": 1}),
    "permutation": (PermutationLMConfig(), XLNetConfig.base(None), {"num_layers": 1}),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, TokenizerConfig(vocab_size=160))


@pytest.fixture(scope="module", params=TASKS)
def made(request, tokenizer):
    config, model, sizes = TASKS[request.param]
    vocab_size = tokenizer.vocab_size + config.num_extra_ids(tokenizer)
    model = replace(model, vocab_size=vocab_size, max_length=LENGTH, **SIZES, **sizes)
    if not isinstance(model, GPTConfig):
        model = replace(model, pad_id=tokenizer.pad_id)
    model = config.adapt(model, RECORDS)
    task = config.build(tokenizer, model, BatchingConfig(rows=4))
    return task, jax.jit(lambda: model.build(nnx.Rngs(0)))()


def layout(task):
    return task.layout(store_of(task, RECORDS), training=True)


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_batch_is_a_function_of_the_seed_and_its_number(made):
    task, _ = made
    batches, again = Batches(layout(task), seed=3, multiple=2), Batches(layout(task), seed=3, multiple=2)
    later = batches.per_epoch + 1
    batches[0]
    assert equal(batches[later], again[later])
    assert not equal(batches[later], batches[later - 1])
    assert not equal(batches[1], Batches(layout(task), seed=4, multiple=2)[1])


def test_processes_make_their_shards_of_the_same_batch(made):
    task, _ = made
    whole = Batches(layout(task), multiple=2)[1]
    shards = [Batches(layout(task), multiple=2, shard=Shard(index, 2))[1] for index in range(2)]
    assert equal(whole, {name: np.concatenate([shard[name] for shard in shards]) for name in whole})


def test_metrics_do_not_depend_on_how_rows_are_batched(made):
    task, model = made
    metrics = evaluate(task, model, RECORDS)
    seen = []
    again = evaluate(replace(task, batching=BatchingConfig(rows=3)), model, RECORDS, tick=seen.append)
    assert metrics == pytest.approx(again, rel=1e-5)
    assert sum(seen) == sum(bucket.num_rows for bucket in layout(task).buckets)


@pytest.mark.parametrize("limit", [1, 3, 10_000])
def test_so_many_rows_are_evaluated_and_no_more(made, limit):
    task, model = made
    num_rows, seen = sum(bucket.num_rows for bucket in layout(task).buckets), []
    metrics = evaluate(task, model, RECORDS, limit=limit, tick=seen.append)
    assert 3 < num_rows < 10_000 and sum(seen) == min(limit, num_rows)
    assert (metrics == evaluate(task, model, RECORDS)) == (limit > num_rows)


def test_rows_that_only_fill_a_batch_up_weigh_nothing(made):
    task, model = made
    rows = layout(task)
    some = min(2, rows.buckets[0].num_rows)

    def total(model, batch):
        terms = loss_terms(task.loss(model, batch, None))
        return sum(term.factor * term.total for term in terms.values()), terms

    loss = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, exact), gradient = loss(model, rows.rows(0, np.arange(some), some, np.random.default_rng))
    (_, filled), filled_gradient = loss(model, rows.rows(0, np.arange(some), some + 3, np.random.default_rng))
    assert exact.keys() == filled.keys()
    for name, term in exact.items():
        assert float(term.weight) == float(filled[name].weight) > 0
        np.testing.assert_allclose(term.total, filled[name].total, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(filled_gradient), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1, np.abs(one).max()))


def test_every_weight_of_the_model_learns(made):
    task, model = made
    batch = next(batch for _, batch in Batches(layout(task)).once())
    gradient = jax.jit(jax.grad(lambda model: mean_loss(loss_terms(task.loss(model, batch, None)))["loss"]))(model)
    idle = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
        if not np.abs(leaf).max() > 0
    }
    # Nothing is added to a softmax by what is the same for all keys.
    assert {name for name in idle if "key/bias" not in name} == set()


def test_samples_name_their_input_first(made):
    task, model = made
    samples = task.samples(RECORDS[:3], Predictor(task, model, ONE))
    assert len(samples) == 3 and next(iter(samples[0])) == "text"
    assert {tuple(sample) for sample in samples} <= {("text", "model"), ("text", "model", "reference")}
