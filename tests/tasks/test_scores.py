"""Metrics against the rules of the field's own scripts, written out."""

import re
import string
from collections import Counter

import numpy as np
import pytest

from transformer_jax.tasks.scores import accuracy, answer_scores, macro_f1, span_scores, spans


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        # IOB2: every span begins with B.
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        # IOB1: B is only for a span right after another of its type.
        ("I-PER I-PER O I-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("I-PER B-PER I-PER", [("PER", 0, 1), ("PER", 1, 3)]),
        ("I-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
        # IOBES: a last word has E, and the word of a span of one has S.
        ("B-PER I-PER E-PER S-LOC S-LOC", [("PER", 0, 3), ("LOC", 3, 4), ("LOC", 4, 5)]),
        ("B-PER E-PER B-PER E-PER", [("PER", 0, 2), ("PER", 2, 4)]),
        # What no scheme allows is what conlleval makes of it.
        ("B-PER I-LOC", [("PER", 0, 1), ("LOC", 1, 2)]),
        ("E-PER E-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("B-PER O I-PER", [("PER", 0, 1), ("PER", 2, 3)]),
        ("O O", []),
        ("", []),
        # Types with hyphens, and none.
        ("B-work-of-art I-work-of-art", [("work-of-art", 0, 2)]),
        ("B I O", [("", 0, 2)]),
    ],
)
def test_spans_by_hand(tags, expected):
    assert spans(tags.split()) == expected


def conlleval(tags):
    """The spans by `startOfChunk` and `endOfChunk` of conlleval.pl (Tjong Kim Sang), with S for its one-word "["."""
    found, begin = [], None
    before, kind_before = "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        ends = (before, prefix) in {(a, b) for a in "BI" for b in "BSO"} or before in ("E", "S")
        ends |= before != "O" and kind_before != kind
        starts = prefix in ("B", "S") or (before, prefix) in {(a, b) for a in "ESO" for b in "EI"}
        starts |= prefix != "O" and kind_before != kind
        if begin is not None and ends:
            found.append((kind_before, begin, position))
            begin = None
        if starts:
            begin = position
        before, kind_before = prefix, kind
    return found


def test_spans_are_those_of_conlleval_for_any_tags():
    random = np.random.default_rng(0)
    known = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "xy")]
    for _ in range(2000):
        tags = random.choice(known, random.integers(1, 7)).tolist()
        assert spans(tags) == conlleval(tags), tags


def test_a_span_is_right_if_its_words_and_its_type_are():
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "I-LOC"]]
    assert span_scores(predicted, expected) == {
        "precision": pytest.approx(1 / 3),
        "recall": pytest.approx(1 / 3),
        "f1": pytest.approx(1 / 3),
        "tag_accuracy": pytest.approx(4 / 6),
    }
    # The same span in another text is another.
    assert span_scores([["B-X"], ["O"]], [["O"], ["B-X"]])["f1"] == 0
    assert span_scores([["O"]], [["O"]]) == {"precision": 0, "recall": 0, "f1": 0, "tag_accuracy": 1}
    uneven = span_scores([["B-X", "B-X", "B-X", "O"]], [["B-X", "O", "O", "O"]])
    assert (uneven["precision"], uneven["recall"], uneven["f1"]) == pytest.approx((1 / 3, 1, 1 / 2))


def test_accuracy_and_the_mean_of_the_f1_of_each_label():
    predicted, expected = [0, 0, 1, 2, 2], [0, 1, 1, 2, 0]
    assert accuracy(predicted, expected) == pytest.approx(3 / 5)
    # Label 0: 1 right of 2 predicted and 2 expected; label 1: 1 of 1 and 2; label 2: 1 of 2 and 1.
    assert macro_f1(predicted, expected) == pytest.approx((1 / 2 + 2 / 3 + 2 / 3) / 3)


def squad_words(text):
    """`normalize_answer` of evaluate-v1.1.py."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_f1(prediction, reference):
    """`f1_score` of evaluate-v1.1.py."""
    words, others = squad_words(prediction).split(), squad_words(reference).split()
    same = sum((Counter(words) & Counter(others)).values())
    if same == 0:
        return 0
    precision, recall = same / len(words), same / len(others)
    return 2 * precision * recall / (precision + recall)


def test_answers_are_scored_as_squads_script_does():
    answers = ["The cat's mat.", "a dog", "in 1969", "U.S.", "ein Haus", "", "Theme", "b b a b"]
    references = ["cats mat", "the dog", "1969", "us", "ein Haus am See", "x", "the me", "b c b"]
    found = answer_scores(answers, references)
    exact = [squad_words(a) == squad_words(b) for a, b in zip(answers, references, strict=True)]
    assert found["exact_match"] == pytest.approx(np.mean(exact)) and 0 < np.mean(exact) < 1
    assert found["f1"] == pytest.approx(np.mean([squad_f1(*pair) for pair in zip(answers, references, strict=True)]))


def test_tags_without_a_prefix_are_spans_of_one_word_each():
    scores = span_scores([["NN", "VB", "DT"]], [["VB", "NN", "DT"]])
    assert (scores["precision"], scores["recall"], scores["f1"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert spans(["NN", "NN", "O"]) == [("NN", 0, 1), ("NN", 1, 2)]
