"""Tags of words."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.tasks.running import evaluate, fit, store_of, tiny_bert, write
from transformer_jax.data import BatchingConfig
from transformer_jax.errors import UserError
from transformer_jax.tasks import TaggingConfig
from transformer_jax.tasks.scores import span_scores

# A word with an x is a name; two of them are one.
TEXTS = ["ab cx", "xa xb c", "a b c", "cx", "b xx a xc", "xaxa ab", "c c xb ax"]


def tags_of(words):
    tags = []
    for number, word in enumerate(words):
        goes_on = number > 0 and "x" in words[number - 1]
        tags.append(("I-N" if goes_on else "B-N") if "x" in word else "O")
    return tags


RECORDS = [{"text": text.split(), "tags": tags_of(text.split())} for text in TEXTS]


@pytest.fixture(scope="module")
def made():
    return tiny_bert(TaggingConfig(), RECORDS)


def test_the_loss_falls_until_the_tags_are_known(made):
    task, model = made
    trained, losses = fit(task, model, RECORDS, steps=400)
    assert losses[-1] < 0.2 * losses[0]
    assert evaluate(task, trained, RECORDS)["f1"] == 1
    assert write(task, trained, TEXTS) == [" ".join(record["tags"]) for record in RECORDS]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_metrics_do_not_depend_on_the_rows_of_a_batch(made, rows):
    task, model = made
    expected = evaluate(task, model, RECORDS)
    other = replace(task, batching=BatchingConfig(rows=rows))
    assert evaluate(other, model, RECORDS) == pytest.approx(expected, rel=1e-5)


def test_metrics_are_those_of_the_tags_that_are_written(made):
    task, model = made
    written = [tags.split() for tags in write(task, model, TEXTS)]
    expected = span_scores(written, [record["tags"] for record in RECORDS])
    found = evaluate(task, model, RECORDS)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["characters", "wordpiece", "bpe", "byte_bpe", "unigram"])
def test_only_the_first_token_of_a_word_has_its_tag(kind):
    task, model = tiny_bert(TaggingConfig(), RECORDS, kind=kind)
    for record, example in zip(RECORDS, task.encode(RECORDS), strict=True):
        words, tags = np.asarray(example["words"]), np.asarray(example["tags"])
        assert len(example["ids"]) == len(words) == len(tags)
        assert words[words >= 0].tolist() == list(range(len(record["text"])))
        assert [task.label_names[tag] for tag in tags[tags >= 0]] == record["tags"]
        assert ((tags >= 0) == (words >= 0)).all() and words[0] == words[-1] == -1
        # From one first token to the next is the text of a word.
        starts = [*np.flatnonzero(words >= 0), len(words) - 1]
        pieces = [example["ids"][a:b] for a, b in pairwise(starts)]
        assert [text.strip() for text in task.tokenizer.decode(pieces)] == record["text"]
    weight = sum(len(record["tags"]) for record in RECORDS)
    batch = task.layout(store_of(task, RECORDS), training=False)
    total = sum(
        float(task.loss(model, batch.rows(bucket, np.arange(rows), rows, np.random.default_rng), None)[1])
        for bucket, (rows, _) in enumerate(batch.buckets)
    )
    assert total == weight


def test_words_behind_the_end_of_a_row_are_not_tagged(made):
    task, model = made
    words = ["xa"] * 12  # of which a row of 24 has room for 22 characters, spaces among them
    example, records = task.encode([{"text": words}])[0], [{"text": words, "tags": tags_of(words)}]
    assert len(example["ids"]) == len(example["words"]) == task.max_length
    inside = sum(word >= 0 for word in example["words"])
    assert 0 < inside < 12
    (written,) = write(task, model, [" ".join(words)])
    assert written.split()[inside:] == ["O"] * (12 - inside) and len(written.split()) == 12
    layout = task.layout(store_of(task, records), training=True)
    batch = layout.rows(0, np.arange(1), 1, np.random.default_rng)
    assert float(task.loss(model, batch, None)[1]) == inside
    assert evaluate(task, model, records)["recall"] == 0  # all words are one span, which cannot be found whole


def test_a_word_that_the_tokenizer_removes_moves_no_other_tag(made):
    task, _ = made
    (example,) = task.encode([{"text": ["ab", " ", "cx"], "tags": ["O", "O", "B-N"]}])
    words, tags = np.asarray(example["words"]), np.asarray(example["tags"])
    assert words[words >= 0].tolist() == [0, 2]
    assert [task.label_names[tag] for tag in tags[tags >= 0]] == ["O", "B-N"]


def test_strings_are_split_at_spaces_and_must_match(made):
    task, _ = made
    (listed,), (joined,) = (
        task.encode([{"text": text, "tags": tags}]) for text, tags in ((["ab", "cx"], ["O", "B-N"]), ("ab cx", "O B-N"))
    )
    assert {name: list(value) for name, value in listed.items()} == {
        name: list(value) for name, value in joined.items()
    }
    with pytest.raises(UserError, match="the text 'ab cx' has 2 words but 1 tags"):
        task.encode([{"text": "ab cx", "tags": "O"}])
