"""Labels of texts and of pairs of texts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import evaluate, fit, store_of, tiny_bert, write
from transformer_jax.data import BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import BertConfig, GPTConfig
from transformer_jax.tasks import ClassificationConfig
from transformer_jax.tasks.scores import accuracy, macro_f1

# Whether there is an x in it.
TEXTS = ["abc", "axb", "cc", "xx", "ba", "cxa", "b", "x", "acb", "bxc", "ab" * 9, "ab" * 8 + "x", "c", "cx"]
RECORDS = [{"text": text, "label": "with" if "x" in text else "without"} for text in TEXTS]
# Whether there is an x in the second.
PAIRS = [{"text": a, "pair": b, "label": int("x" in b)} for a in ("ab", "xb", "bx") for b in ("ab", "bx", "c", "xa")]


@pytest.fixture(scope="module")
def made():
    return tiny_bert(ClassificationConfig(), RECORDS)


def test_the_loss_falls_until_the_labels_are_known(made):
    task, model = made
    trained, losses = fit(task, model, RECORDS, steps=60)
    assert losses[0] == pytest.approx(np.log(2), abs=0.3) and losses[-1] < 0.3 * losses[0]
    metrics = evaluate(task, trained, RECORDS)
    assert metrics["accuracy"] == metrics["macro_f1"] == 1
    assert write(task, trained, TEXTS) == [record["label"] for record in RECORDS]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_metrics_do_not_depend_on_the_rows_of_a_batch(made, rows):
    task, model = made
    expected = evaluate(task, model, RECORDS)
    assert evaluate(replace(task, batching=BatchingConfig(rows=rows)), model, RECORDS) == pytest.approx(
        expected, rel=1e-5
    )


def test_metrics_are_those_of_the_labels_that_are_written(made):
    task, model = made
    written, expected = write(task, model, TEXTS), [record["label"] for record in RECORDS]
    metrics = evaluate(task, model, RECORDS)
    assert metrics["accuracy"] == pytest.approx(accuracy(written, expected))
    assert metrics["macro_f1"] == pytest.approx(macro_f1(written, expected))


def test_rows_and_types_of_a_text_and_of_a_pair(made):
    task, _ = made
    (example,) = task.encode([{"text": "ab", "label": "without"}])
    begin, end, (a, b) = task.tokenizer.begin_id, task.tokenizer.end_id, task.tokenizer.encode(["ab"])[0]
    assert example == {"ids": [begin, a, b, end], "types": [0] * 4, "label": 1}
    pairs, _ = tiny_bert(ClassificationConfig(pairs=True), PAIRS)
    (example,) = pairs.encode([PAIRS[1]])
    first, second = pairs.tokenizer.encode(["ab", "bx"])
    begin, end = pairs.tokenizer.begin_id, pairs.tokenizer.end_id
    assert example == {"ids": [begin, *first, end, *second, end], "types": [0] * 4 + [1] * 3, "label": 1}
    assert pairs.problems(["ab\tba", "ab", " "]) == [None, "has 1 texts; give 2, with a tab between them", "is empty"]


def test_a_pair_is_told_by_both_of_its_texts():
    task, model = tiny_bert(ClassificationConfig(pairs=True), PAIRS, rows=12)
    trained, _ = fit(task, model, PAIRS, steps=300, rate=1e-2)
    assert evaluate(task, trained, PAIRS)["accuracy"] == 1
    assert write(task, trained, ["xb\tab", "ab\tbx"]) == ["0", "1"]


def test_a_text_that_is_too_long_is_cut_before_its_end(made):
    task, model = made
    long = [{"text": "ab" * 20, "label": "with"}]
    layout = task.layout(store_of(task, long), training=False)
    batch = layout.rows(0, np.arange(1), 1, np.random.default_rng)
    assert batch["ids"].shape == (1, task.max_length) and batch["ids"][0, -1] == task.tokenizer.end_id
    assert evaluate(task, model, long)["loss"] == pytest.approx(
        evaluate(task, model, [{"text": "ab" * 11, "label": "with"}])["loss"]
    )


def test_labels_are_those_of_the_training_set_in_their_order(made):
    task, model = made
    assert task.label_names == ("with", "without")
    numbers = [{"text": "a", "label": label} for label in (10, 2, 1)]
    assert ClassificationConfig().adapt(model.config, numbers).label_names == ("1", "2", "10")
    # A model that knows them all keeps those that it has, in its order.
    known = replace(model.config, num_labels=3, label_names=("without", "maybe", "with"))
    assert ClassificationConfig().adapt(known, RECORDS).label_names == known.label_names
    with pytest.raises(
        UserError, match="the label 'perhaps' is unknown; the training set has 2 labels \\(with, without\\)"
    ):
        task.encode([{"text": "a", "label": "perhaps"}])


def test_packed_rows_are_refused(made):
    task, model = made
    with pytest.raises(UserError, match="pack_length=32, but Classification has a"):
        ClassificationConfig().build(task.tokenizer, model.config, BatchingConfig(pack_length=32))


def test_a_record_without_a_label_is_named():
    with pytest.raises(UserError, match="has no label"):
        tiny_bert(ClassificationConfig(), [{"text": "a", "label": None}, {"text": "b", "label": "x"}])


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut():
    task, _ = tiny_bert(ClassificationConfig(pairs=True), PAIRS)
    for first, second in (("a" * 60, "bc"), ("ab", "c" * 60), ("a" * 60, "c" * 60)):
        (row,) = task.encode([{"text": first, "pair": second}])
        ids, tokenizer = np.array(row["ids"]), task.tokenizer
        assert len(ids) == len(row["types"]) == task.max_length
        assert (ids == tokenizer.end_id).sum() == 2 and ids[0] == tokenizer.begin_id and ids[-1] == tokenizer.end_id
        lengths = [row["types"].count(0) - 2, row["types"].count(1) - 1]
        room = task.max_length - 3
        assert lengths == [min(len(first), max(room - len(second), room - room // 2)), room - lengths[0]]


def test_a_gpt_classifies_by_its_last_token_whatever_is_behind_it():
    config = replace(
        GPTConfig.small(None), d_model=16, num_heads=2, d_ff=24, num_layers=1, max_length=24, dtype="float32"
    )
    tokenizer = Tokenizer.train(["abcx"], TokenizerConfig(kind="characters"))
    config = ClassificationConfig().adapt(replace(config, vocab_size=tokenizer.vocab_size), RECORDS)
    task = ClassificationConfig().build(tokenizer, config, BatchingConfig(rows=4))
    model = jax.jit(lambda: config.build(nnx.Rngs(0)))()
    trained, losses = fit(task, model, RECORDS, steps=60)
    assert losses[-1] < 0.3 * losses[0]
    together = write(task, trained, TEXTS)
    assert together == [write(task, trained, [text])[0] for text in TEXTS]
    assert task.encode([{"text": ""}])[0]["ids"] == [tokenizer.end_id]  # and no row is empty


def test_logits_of_a_head_have_more_than_the_bits_of_bfloat16():
    config = replace(BertConfig.base(9, pad_id=0), d_model=16, num_heads=2, d_ff=24, num_layers=1, dtype="bfloat16")
    model = replace(config, heads=("span",)).build(nnx.Rngs(0))
    logits = model.span(model(np.arange(8)[None]))
    assert logits.dtype == np.float32
    assert not np.array_equal(logits, logits.astype("bfloat16").astype("float32"))
