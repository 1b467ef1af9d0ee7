"""Metrics of a set do not depend on how it is batched, nor on how many devices it is evaluated on."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.tasks.running import ONE, evaluate, store_of, write
from transformer_jax.data import Batches, BatchingConfig, Dates, Tokenizer, TokenizerConfig
from transformer_jax.data.rows import Rows
from transformer_jax.errors import UserError
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import BeamSearchConfig, TranslationConfig

DATA = Dates(train_size=100, test_size=103)


@pytest.fixture(scope="module")
def task():
    texts = [text for record in DATA.split("train") for text in record.values()]
    tokenizer = Tokenizer.train(texts, TokenizerConfig(vocab_size=300), tags=DATA.tags())
    config = TranslationConfig(decoding=BeamSearchConfig(num_beams=1, extra_length=2))
    model = replace(tiny.CONFIG, max_length=64)
    return config.build(tokenizer, model, BatchingConfig(512, num_buckets=1))


@pytest.fixture(scope="module")
def model(task):
    return tiny.make(replace(tiny.CONFIG, vocab_size=task.tokenizer.vocab_size, pad_id=task.tokenizer.pad_id))


@pytest.fixture(scope="module")
def metrics(task, model):
    return evaluate(task, model, DATA.split("test"))


@pytest.mark.parametrize(("tokens", "devices"), [(200, 1), (3000, 1), (512, 4)])
def test_metrics_do_not_depend_on_batches_and_devices(task, model, metrics, tokens, devices):
    strategy = ONE if devices == 1 else Strategy.choose(devices=jax.devices()[:devices])
    seen = []
    other = replace(task, batching=BatchingConfig(tokens, num_buckets=1))
    again = evaluate(other, strategy.replicate(model), DATA.split("test"), strategy, tick=seen.append)
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    assert again["chrf"] == pytest.approx(metrics["chrf"]) and metrics["chrf"] > 0
    assert sum(seen) == 103


def test_exact_match_counts_what_is_exactly_right(task, model):
    records = [*DATA.split("test")]
    outputs = write(task, model, [record["source"] for record in records])
    right = [{**record, "target": output} for record, output in zip(records, outputs, strict=True)]
    assert evaluate(task, model, right)["exact_match"] == 1
    half = [*right[:50], *({**record, "target": record["target"] + "x"} for record in right[50:])]
    assert evaluate(task, model, half)["exact_match"] == pytest.approx(50 / 103)


def test_a_translation_does_not_depend_on_its_neighbours(task, model):
    texts = ["<de> 5 km", "<ja> Tuesday, March 4, 2025", "<fr> 3/4"]
    together = write(task, model, texts)
    assert together == [write(task, model, [text])[0] for text in texts]


def test_the_loss_is_of_the_targets_tokens_whatever_is_behind_them(task):
    source, target = tiny.pairs()
    segments = {"source_segments": (source != tiny.PAD) * 1, "target_segments": (target != tiny.PAD) * 1}
    total, weight = task.loss(tiny.make(), {"source": source, "target": target, **segments}, None)
    assert int(weight) == int((target[:, 1:] != tiny.PAD).sum()) < target[:, 1:].size
    other = jnp.where(target == tiny.PAD, 5, target)
    again, same = task.loss(tiny.make(), {"source": source, "target": other, **segments}, None)
    assert int(weight) == int(same)
    np.testing.assert_allclose(total, again, rtol=1e-6)


def test_packed_batches_have_the_loss_and_the_gradient_of_unpacked_ones(task, model):
    examples = store_of(task, DATA.split("test")[:20])

    def total(pack_length, model):
        batching = BatchingConfig(4096, num_buckets=1, pack_length=pack_length)
        ((_, batch),) = Batches(Rows(examples, batching)).once()
        return replace(task, batching=batching).loss(model, batch, None)

    alone, packed = (jax.jit(jax.value_and_grad(partial(total, length), has_aux=True))(model) for length in (None, 64))
    assert float(packed[0][1]) == float(alone[0][1]) == float(sum(len(e["target"]) - 1 for e in examples))
    np.testing.assert_allclose(packed[0][0], alone[0][0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(packed[1]), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_scores_are_sacrebleus_on_raw_text(task, model):
    import sacrebleu

    records = [*DATA.split("test")[:30]]
    outputs = write(task, model, [record["source"] for record in records])
    # Half right, so that there is something to score.
    records = [
        {**r, "target": o if i % 2 else r["target"]} for i, (r, o) in enumerate(zip(records, outputs, strict=True))
    ]
    metrics = evaluate(task, model, records)
    references = [[record["target"] for record in records]]
    assert metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, references).score)
    assert metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, references).score)
    assert metrics["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert 0 < metrics["bleu"] < 100


def test_of_a_text_that_is_too_long_the_beginning_is_evaluated(task, model):
    learned = tiny.make(
        replace(
            tiny.CONFIG, vocab_size=task.tokenizer.vocab_size, pad_id=0, positions="learned", max_length=task.max_length
        )
    )
    long = {"source": "<de> " + "5 " * 100, "target": "5 " * 100}
    metrics = evaluate(task, learned, [*DATA.split("test")[:3], long])
    other = {"source": "<de> " + "5 " * 40 + "7 " * 60, "target": "5 " * 40 + "7 " * 60}
    beginning = evaluate(task, learned, [*DATA.split("test")[:3], other])
    assert metrics["loss"] == pytest.approx(beginning["loss"])
    assert metrics["loss"] != pytest.approx(evaluate(task, learned, [*DATA.split("test")[:3]])["loss"])


def test_too_long_a_text_is_named(task, model):
    assert task.problems(["<de> 5 km", " ", "x" * 100])[:2] == [None, "is empty"]
    with pytest.raises(UserError, match=r"the text 'x{20}'\.\.\. has 101 tokens; the model reads at most 64"):
        write(task, model, ["<de> 5 km", "x" * 100])
    longest = "x" * 63
    assert task.problems([longest, longest + "x"])[0] is None and "has 65 tokens" in task.problems([longest + "x"])[0]
