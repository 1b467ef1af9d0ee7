"""Answers that stand in a passage."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tasks.running import evaluate, fit, store_of, tiny_bert, write
from transformer_jax.data import BatchingConfig
from transformer_jax.errors import UserError
from transformer_jax.tasks import QuestionAnsweringConfig
from transformer_jax.tasks.scores import answer_scores
from transformer_jax.tasks.task import loss_terms

# The answer is what stands between the brackets.
RECORDS = [
    {"question": "q?", "passage": f"{before}({answer}){after}", "answer": answer}
    for before, answer, after in [
        ("ab", "c", "a"),
        ("", "abc", "ccb"),
        ("bca", "ca", ""),
        ("a", "b", "cab"),
        ("cc", "bb", "aa"),
        ("b", "aca", "b"),
        ("abca", "cb", "c"),
        ("c", "a", "cabcab"),
        ("", "c", "b"),
    ]
]
ACCENTS = "Zürich, cafe\u0301 naïve: 👩‍🚀 日本 ﬁn Ａ!"


@pytest.fixture(scope="module")
def made():
    return tiny_bert(QuestionAnsweringConfig(max_answer_length=5), RECORDS)


def test_the_loss_falls_until_the_answers_are_found(made):
    task, model = made
    trained, losses = fit(task, model, RECORDS, steps=300)
    assert losses[-1] < 0.1 * losses[0]
    metrics = evaluate(task, trained, RECORDS)
    assert metrics["exact_match"] == metrics["f1"] == 1
    lines = [f"{record['question']}\t{record['passage']}" for record in RECORDS]
    assert write(task, trained, lines) == [record["answer"] for record in RECORDS]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_metrics_do_not_depend_on_the_rows_of_a_batch(made, rows):
    task, model = made
    expected = evaluate(task, model, RECORDS)
    other = replace(task, batching=BatchingConfig(rows=rows))
    assert evaluate(other, model, RECORDS) == pytest.approx(expected, rel=1e-5)


def test_metrics_are_squads_of_the_answers_that_are_written(made):
    task, model = made
    written = write(task, model, [f"{record['question']}\t{record['passage']}" for record in RECORDS])
    expected = answer_scores(written, [record["answer"] for record in RECORDS])
    found = evaluate(task, model, RECORDS)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_an_answer_that_cannot_be_seen_has_no_weight(made):
    task, model = made
    # A row of 24 has room for 19 characters of a passage, beside two of a question and three special tokens.
    seen = {"question": "q?", "passage": "a" * 17 + "bc" + "a" * 9, "answer": "bc"}
    half = {"question": "q?", "passage": "a" * 18 + "bc" + "a" * 8, "answer": "bc"}
    gone = {"question": "q?", "passage": "a" * 30 + "bc", "answer": "bc"}
    examples = task.encode([seen, half, gone])
    assert [(example["first"], example["last"]) for example in examples] == [(21, 22), (-1, -1), (-1, -1)]
    assert all(len(example["ids"]) == len(example["characters"]) == task.max_length for example in examples)

    def terms(records):
        layout = task.layout(store_of(task, records), training=True)
        return loss_terms(task.loss(model, layout.rows(0, np.arange(len(records)), 4, np.random.default_rng), None))

    alone, all_three = terms([seen]), terms([seen, half, gone])
    for name, term in all_three.items():
        assert float(term.weight) == 1
        np.testing.assert_allclose(term.total, alone[name].total, rtol=1e-5)
    assert all(float(term.total) == float(term.weight) == 0 for term in terms([half, gone]).values())


class Fixed:
    """A model whose logits are given."""

    config = SimpleNamespace(num_types=1)

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, ids, types, *, valid, dropout_key=None):
        return ids

    def span(self, x, *, dropout_key=None):
        return self.logits


def test_the_answer_is_the_likeliest_that_ends_where_it_begins_or_behind(made):
    task, _ = made
    record = {"question": "q?", "passage": "abcabcabca", "answer": "a"}
    layout = task.layout(store_of(task, [record]), training=False)
    batch = layout.rows(0, np.arange(1), 1, np.random.default_rng)
    passage = np.flatnonzero(batch["characters"][0, :, 0] >= 0)
    assert len(passage) == 10
    random = np.random.default_rng(0)
    backwards = 0
    for _ in range(40):
        logits = random.normal(scale=3, size=(*batch["ids"].shape, 2)).astype(np.float32)
        pairs = {
            (a, b): logits[0, first, 0] + logits[0, last, 1]
            for a, first in enumerate(passage)
            for b, last in enumerate(passage)
        }
        backwards += max(pairs, key=pairs.get)[1] < max(pairs, key=pairs.get)[0]
        allowed = {pair: score for pair, score in pairs.items() if 0 <= pair[1] - pair[0] < 5}
        begin, end = max(allowed, key=allowed.get)
        found = task.predict(Fixed(jnp.asarray(logits)), batch)
        assert (int(found["start"][0]), int(found["stop"][0])) == (begin, end + 1)
    assert backwards > 5  # so that it would show


@pytest.mark.parametrize("kind", ["characters", "wordpiece", "bpe", "byte_bpe", "unigram"])
@pytest.mark.parametrize("answer", ["Zürich", "cafe\u0301", "naïve", "👩‍🚀", "日本", "ﬁn", "Ａ"])
def test_tokens_map_back_to_the_characters_of_the_answer(kind, answer):
    record = {"question": "?", "passage": ACCENTS, "answer": answer}
    task, _ = tiny_bert(QuestionAnsweringConfig(), [record], max_length=128, kind=kind)
    (example,) = task.encode([record])
    (start, _), (_, stop) = (example["characters"][example[name]] for name in ("first", "last"))
    begin = ACCENTS.index(answer)
    assert start <= begin < begin + len(answer) <= stop
    if kind == "characters":
        assert ACCENTS[start:stop] == answer


def test_mistakes_are_named(made):
    task, _ = made
    with pytest.raises(UserError, match="the answer 'xyz' does not stand in its passage"):
        task.encode([{"question": "q?", "passage": "abc", "answer": "xyz"}])
    with pytest.raises(UserError, match="has 21 tokens, which leaves no room for a passage in the 24"):
        task.encode([{"question": "q" * 21, "passage": "abc", "answer": "a"}])
    assert task.problems(["q?\tabc", "abc", "a\tb\tc"]) == [None, *["needs a question, a tab and a passage"] * 2]
    with pytest.raises(UserError, match="max_answer_length must be at least 1; got 0"):
        QuestionAnsweringConfig(max_answer_length=0)
