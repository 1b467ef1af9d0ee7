"""Metrics, each as the field's own scripts compute it, so that they can be compared with anybody's."""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

BleuTokenizer = Literal["13a", "intl", "zh", "char"]
PREFIXES = ("B", "I", "O", "E", "S")
Labels = Sequence[Any] | np.ndarray


def perplexity(loss: float) -> float:
    """What a loss in nats per token is the logarithm of."""
    return math.exp(min(loss, 700))


def translation_scores(
    outputs: Sequence[str], references: Sequence[str], tokenizer: BleuTokenizer = "13a"
) -> dict[str, float | str]:
    """BLEU and chrF of a whole set, with the signatures that say how they were computed (Post 2018)."""
    from sacrebleu.metrics import BLEU, CHRF  # slow to import, and only needed here

    # `force` only silences a guess: our references may well look tokenized, and are scored as they are.
    metrics: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenizer, force=True)), ("chrf", CHRF())):
        metrics[name] = metric.corpus_score(list(outputs), [list(references)]).score
        metrics[f"{name}_signature"] = str(metric.get_signature())
    return metrics


def accuracy(predicted: Labels, expected: Labels) -> float:
    """Fraction of predictions that are right."""
    return float(np.mean(np.asarray(predicted) == np.asarray(expected)))


def macro_f1(predicted: Labels, expected: Labels) -> float:
    """The mean of the F1 of each label that is predicted or expected anywhere."""
    found, wanted = np.asarray(predicted), np.asarray(expected)
    scores = []
    for label in np.union1d(found, wanted):
        right = np.sum((found == label) & (wanted == label))
        scores.append(2 * right / (np.sum(found == label) + np.sum(wanted == label)))
    return float(np.mean(scores))


def span_scores(predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> dict[str, float | str]:
    """Precision, recall and F1 of the spans in tags such as B-PER, I-PER, O, and accuracy of the tags.

    A span is right if its first word, its last word and its type are, as conlleval and seqeval count: in IOB1, IOB2 and
    IOBES alike.
    """
    found, wanted = (
        {(row, *span) for row, tags in enumerate(rows) for span in spans(tags)} for rows in (predicted, expected)
    )
    right = len(found & wanted)
    pairs = [pair for rows in zip(predicted, expected, strict=True) for pair in zip(*rows, strict=True)]
    return {
        "precision": right / max(len(found), 1),
        "recall": right / max(len(wanted), 1),
        "f1": 2 * right / max(len(found) + len(wanted), 1),
        "tag_accuracy": sum(tag == other for tag, other in pairs) / max(len(pairs), 1),
    }


def spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The spans that tags describe: the type of each, its first word, and the one after its last."""
    found: list[tuple[str, int, int]] = []
    begin, before, kind_before = 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if prefix not in PREFIXES:  # a part of speech, for one: each word is a span of that type
            prefix, kind = "S", tag
        goes_on = prefix in ("I", "E") and before in ("B", "I") and kind == kind_before
        if not goes_on:
            if before != "O":
                found.append((kind_before, begin, position))
            begin = position
        before, kind_before = prefix, kind
    return found


def answer_scores(answers: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
    """Exact match and F1 of words, as the official script of SQuAD v2.0 computes them (as fractions)."""
    pairs = [
        (_answer_words(answer), _answer_words(reference)) for answer, reference in zip(answers, references, strict=True)
    ]
    return {
        "exact_match": float(np.mean([answer == reference for answer, reference in pairs])),
        "f1": float(np.mean([_overlap(answer, reference) for answer, reference in pairs])),
    }


def _answer_words(text: str) -> list[str]:
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
