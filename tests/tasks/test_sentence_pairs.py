from collections import Counter

import numpy as np
import pytest

from tests.tasks.test_token_masking import is_fair
from transformer_jax.tasks.sentence_pairs import Pair, assemble, sentence_pair

DOCUMENT = np.arange(40, dtype=np.int32)
OTHER = np.arange(1000, 1040, dtype=np.int32)


def pair_of(start, end, seed=0, *, max_length=20, document=DOCUMENT, other=OTHER):
    """A pair for a part of a document."""
    return sentence_pair(
        document[start:end],
        document[:start],
        document[end:],
        np.random.default_rng(seed),
        max_length=max_length,
        other=lambda random: other,
    )


@pytest.mark.parametrize(("start", "end"), [(0, 5), (10, 29), (20, 39), (35, 40), (21, 40)])
def test_half_the_texts_are_beside_their_neighbour_and_all_are_whole(start, end):
    counts = Counter()
    for seed in range(1000):
        pair = pair_of(start, end, seed)
        text, neighbour = (pair.first, pair.second) if end < 40 or not pair.is_next else (pair.second, pair.first)
        assert text.tolist() == list(range(start, end))
        if pair.is_next:
            assert pair.second[0] == pair.first[-1] + 1 and (np.diff(neighbour) == 1).all()
        else:
            assert neighbour.tolist() == OTHER[: len(neighbour)].tolist()
        assert len(pair.first) + len(pair.second) == min(20, 40 - start if pair.is_next and end < 40 else 20)
        counts[pair.is_next] += 1
    assert is_fair([counts[True], counts[False]], [0.5, 0.5])


def test_all_of_a_document_is_never_followed_by_itself():
    for seed in range(50):
        pair = pair_of(0, 5, seed, document=DOCUMENT[:5])
        assert not pair.is_next and pair.first.tolist() == [0, 1, 2, 3, 4] and pair.second.min() >= 1000


def test_a_short_neighbour_leaves_room():
    pairs = [pair_of(0, 5, seed, document=DOCUMENT[:8], other=OTHER[:2]) for seed in range(20)]
    assert {(pair.is_next, *pair.second.tolist()) for pair in pairs} == {(True, 5, 6, 7), (False, 1000, 1001)}


def test_another_document_is_drawn_from_the_generator_of_the_row():
    def second(seed):
        generator, empty = np.random.default_rng(seed), DOCUMENT[:0]
        return sentence_pair(
            DOCUMENT[:2], empty, empty, generator, max_length=9, other=lambda random: random.integers(1000, size=4)
        ).second.tolist()

    assert second(1) == second(1) != second(2)


def test_the_label_of_what_is_next_is_zero():
    ids = np.array([5])
    assert Pair(ids, ids, True).label == 0 and Pair(ids, ids, False).label == 1


def test_assembled_as_in_the_paper():
    """[CLS] my dog is cute [SEP] he likes play ##ing [SEP] (figure 2)."""
    pair = Pair(np.array([11, 12, 13, 14], np.int32), np.array([21, 22, 23, 24], np.int32), True)
    ids, types = assemble(pair, begin_id=101, end_id=102)
    assert ids.tolist() == [101, 11, 12, 13, 14, 102, 21, 22, 23, 24, 102]
    assert types.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert ids.dtype == types.dtype == np.int32


def test_a_text_that_leaves_no_room_is_named():
    with pytest.raises(ValueError, match="text has 5 tokens; give at least 1, and fewer than max_length=5"):
        pair_of(0, 5, max_length=5)
    with pytest.raises(ValueError, match="text has 0 tokens"):
        pair_of(3, 3)
