import itertools
from collections import Counter

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.tasks.token_masking import mask_tokens

MASK = 4


def masked(ids, candidates=None, seed=0, *, vocab_size=1000, rate=0.15, max_predictions=80, continues=None):
    ids = np.asarray(ids, np.int32)
    return mask_tokens(
        ids,
        np.ones(len(ids), bool) if candidates is None else np.array(candidates, bool),
        np.random.default_rng(seed),
        mask_id=MASK,
        vocab_size=vocab_size,
        rate=rate,
        max_predictions=max_predictions,
        continues=None if continues is None else np.array(continues, bool),
    )


def is_fair(counts, chances):
    """Whether counts agree with chances, by chi-square; a fair one fails less than once in a million times."""
    expected = np.array(chances) * sum(counts)
    surprise = np.sum((np.array(counts) - expected) ** 2 / expected)
    freedom = len(counts) - 1
    return surprise < freedom + 6 * np.sqrt(2 * freedom) + 20


def test_positions_and_labels_say_what_was_there():
    ids = np.arange(100, 612, dtype=np.int32)
    row = masked(ids)
    assert row.positions.tolist() == sorted(set(row.positions.tolist()))
    assert row.labels.tolist() == ids[row.positions].tolist()
    elsewhere = np.ones(len(ids), bool)
    elsewhere[row.positions] = False
    assert (row.ids == ids)[elsewhere].all()
    assert (row.ids != ids).any() and row.ids.dtype == row.labels.dtype == ids.dtype


@pytest.mark.parametrize(
    ("length", "rate", "most", "number"),
    [
        (512, 0.15, 80, 77),
        (512, 0.15, 76, 76),
        (128, 0.15, 20, 19),
        (10, 0.15, 20, 2),  # 1.5 with the special tokens, 1.05 without
        (4, 0.1, 20, 1),  # one at least
        (6, 1.0, 20, 3),  # all there are
    ],
)
def test_the_number_is_a_share_of_all_tokens_with_the_special_ones(length, rate, most, number):
    candidates = [False, *[True] * (length - 3), False, False]
    assert len(masked(range(length), candidates, rate=rate, max_predictions=most).positions) == number


def test_special_tokens_are_never_chosen_and_all_others_equally_often():
    candidates = np.array([0, 1, 1, 0, 1, 1, 1, 0], bool)
    counts = Counter()
    for seed in range(3000):
        row = masked(range(100, 108), candidates, seed, rate=0.25)
        counts[tuple(row.positions)] += 1
    pairs = list(itertools.combinations(np.flatnonzero(candidates), 2))
    assert set(counts) == set(pairs)
    assert is_fair([counts[pair] for pair in pairs], np.full(10, 0.1))


def test_nothing_is_predicted_without_candidates():
    for ids, candidates in (([7, 8, 9], [False] * 3), ([], [])):
        row = masked(ids, candidates)
        assert row.ids.tolist() == ids and row.positions.tolist() == row.labels.tolist() == []


def test_eighty_ten_ten():
    length = 50_000
    row = masked(np.zeros(length, int), vocab_size=1_000_000, rate=1.0, max_predictions=length)
    mask, same = (row.ids == MASK).sum(), (row.ids == 0).sum()
    assert is_fair([mask, same, length - mask - same], [0.8, 0.1, 0.1])


def test_a_random_token_is_any_of_the_vocabulary():
    length = 50_000
    row = masked(np.zeros(length, int), vocab_size=6, rate=1.0, max_predictions=length)
    each = 0.1 / 6
    assert is_fair(np.bincount(row.ids, minlength=6), [0.1 + each, each, each, each, 0.8 + each, each])


def test_whole_words_are_chosen_as_by_brute_force():
    """Words in random order, passed over where they do not fit: every order of the words of a row."""
    continues = [0, 0, 1, 1, 0, 0, 1, 0]
    candidates = [0, 1, 1, 1, 1, 1, 1, 0]
    words, number = [(1, 2, 3), (4,), (5, 6)], 4
    expected = Counter()
    for order in itertools.permutations(words):
        chosen = ()
        for word in order:
            if len(chosen) + len(word) <= number:
                chosen += word
        expected[tuple(sorted(chosen))] += 1 / 6
    counts = Counter(
        tuple(masked(range(8), candidates, seed, rate=0.5, continues=continues).positions) for seed in range(3000)
    )
    assert set(counts) == set(expected) and len(expected) == 2
    assert is_fair([counts[places] for places in expected], list(expected.values()))


def test_a_word_longer_than_the_number_is_never_chosen():
    for seed in range(50):
        row = masked(range(6), seed=seed, rate=0.4, continues=[0, 1, 1, 0, 0, 0])
        assert len(row.positions) == 2 and not set(row.positions) & {0, 1, 2}
    assert masked(range(6), rate=0.4, continues=[0, 1, 1, 0, 1, 1]).positions.tolist() == []


def test_a_special_token_ends_a_word():
    """After a cut at its front, a text may begin in the middle of a word."""
    seen = {tuple(masked(range(4), [1, 0, 1, 1], s, rate=0.5, continues=[0, 0, 1, 1]).positions) for s in range(50)}
    assert seen == {(2, 3), (0,)}
    assert {tuple(masked(range(2), seed=s, rate=0.5, continues=[1, 0]).positions) for s in range(50)} == {(0,), (1,)}


def test_each_token_of_a_word_is_replaced_on_its_own():
    words = 20_000
    row = masked(
        np.zeros(2 * words, int),
        vocab_size=1_000_000,
        rate=1.0,
        max_predictions=2 * words,
        continues=np.tile([0, 1], words),
    )
    hidden = (row.ids == MASK).reshape(words, 2).sum(axis=1)
    assert is_fair(np.bincount(hidden, minlength=3), [0.04, 0.32, 0.64])


def test_a_row_is_a_function_of_its_arguments():
    ids = np.arange(100)
    one, two, other = masked(ids, seed=3), masked(ids, seed=3), masked(ids, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one.positions, other.positions)
    assert ids.tolist() == list(range(100))


def test_arguments_are_left_as_they_are():
    ids, candidates, continues = np.arange(100, 120), np.ones(20, bool), np.tile([False, True], 10)
    for array in (ids, candidates, continues):
        array.flags.writeable = False
    mask_tokens(
        ids,
        candidates,
        np.random.default_rng(0),
        mask_id=4,
        vocab_size=9,
        rate=0.5,
        max_predictions=9,
        continues=continues,
    )


def test_what_cannot_be_is_named():
    with pytest.raises(UserError, match="rate=15 must be over 0 and at most 1"):
        masked([1, 2], rate=15)
    with pytest.raises(UserError, match="max_predictions=0 at least 1"):
        masked([1, 2], max_predictions=0)
    with pytest.raises(ValueError, match=r"candidates has shape \(3,\) but ids has shape \(2,\)"):
        masked([1, 2], [True] * 3)
    with pytest.raises(ValueError, match=r"continues has shape \(1,\)"):
        masked([1, 2], continues=[True])
