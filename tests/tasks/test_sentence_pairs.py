import itertools
from collections import Counter

import numpy as np
import pytest

from tests.tasks.test_token_masking import is_fair
from transformer_jax.errors import UserError
from transformer_jax.tasks.sentence_pairs import Pair, assemble, sentence_pair


def sentences(*lengths, start=0):
    """Sentences of these lengths, their ids counted on."""
    ends = start + np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for length, end in zip(lengths, ends, strict=True)]


def pair_of(texts, seed=0, *, max_length=100, others=None):
    others = sentences(3, 3, start=1000) if others is None else others
    return sentence_pair(texts, np.random.default_rng(seed), max_length=max_length, other=lambda random: others)


def test_half_the_pairs_go_on_and_every_boundary_is_a_cut():
    texts = sentences(1, 2, 3, 4)
    counts = Counter()
    for seed in range(3000):
        pair = pair_of(texts, seed)
        cut = len(pair.first)
        assert pair.first.tolist() == list(range(cut))
        if pair.is_next:
            assert pair.second.tolist() == list(range(cut, 10))
        else:
            assert pair.second.min() >= 1000
        counts[cut, pair.is_next] += 1
    kinds = list(itertools.product((1, 3, 6), (True, False)))
    assert set(counts) == set(kinds)
    assert is_fair([counts[kind] for kind in kinds], np.full(6, 1 / 6))


def test_a_single_sentence_is_never_followed_by_its_document():
    for seed in range(50):
        pair = pair_of(sentences(5), seed)
        assert not pair.is_next and pair.first.tolist() == [0, 1, 2, 3, 4] and pair.second.min() >= 1000


@pytest.mark.parametrize(("room", "taken"), [(-5, 2), (0, 2), (1, 2), (2, 2), (3, 5), (5, 5), (6, 9), (9, 9), (50, 9)])
def test_sentences_of_another_document_fill_the_room_and_no_more(room, taken):
    """Whole ones, up to the one that fills it; it is the first text, much longer, that is cut for them."""
    pair = pair_of(sentences(20), max_length=20 + room, others=sentences(2, 3, 4, start=1000))
    assert pair.second.tolist() == list(range(1000, 1000 + taken))
    assert len(pair.first) == 20 - max(taken - room, 0)


def test_another_document_is_drawn_from_the_generator_of_the_row():
    def other(random):
        return [random.integers(1000, size=4)]

    one, two, three = (
        sentence_pair(sentences(2), np.random.default_rng(seed), max_length=9, other=other).second.tolist()
        for seed in (1, 1, 2)
    )
    assert one == two != three


def cut_by_hand(first, second, max_length, coins):
    """The original: while the pair is too long, the longer (or else the second) loses one at a random end."""
    first, second, coins = list(first), list(second), iter(coins)
    while len(first) + len(second) > max_length:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if next(coins) else -1)
    return tuple(first), tuple(second)


def test_lengths_after_the_cut_are_those_of_the_loop():
    for a, b, max_length in itertools.product(range(1, 12), range(1, 12), range(2, 14)):
        texts = sentences(a, b)
        seed = next(seed for seed in itertools.count() if pair_of(texts, seed).is_next)
        pair = pair_of(texts, seed, max_length=max_length)
        first, second = cut_by_hand(*texts, max_length, itertools.repeat(True))
        assert (len(pair.first), len(pair.second)) == (len(first), len(second))
        assert len(first) and len(second)


@pytest.mark.parametrize(("a", "b", "max_length"), [(6, 4, 5), (4, 4, 5), (1, 7, 4)])
def test_what_is_cut_is_as_likely_as_in_the_loop(a, b, max_length):
    texts = sentences(a, b)
    tosses = list(itertools.product([True, False], repeat=a + b - max_length))
    chances = Counter()
    for coins in tosses:
        chances[cut_by_hand(*texts, max_length, coins)] += 1 / len(tosses)
    pairs = (pair_of(texts, seed, max_length=max_length) for seed in range(3000))
    counts = Counter((tuple(pair.first), tuple(pair.second)) for pair in pairs if pair.is_next)
    assert set(counts) <= set(chances)
    assert is_fair([counts[cut] for cut in chances], list(chances.values()))


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


def test_what_cannot_be_is_named():
    with pytest.raises(UserError, match="max_length=1 leaves no room for two texts"):
        pair_of(sentences(2, 2), max_length=1)
    with pytest.raises(ValueError, match="sentences is empty"):
        pair_of([])
    with pytest.raises(ValueError, match="other gave no sentences"):
        pair_of(sentences(2), others=[])
