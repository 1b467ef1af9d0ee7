import itertools
from collections import Counter

import numpy as np
import pytest

from tests.tasks.test_token_masking import is_fair
from transformer_jax.errors import UserError
from transformer_jax.tasks.permutation import permutation_masks, sample_targets


def at(length, *places):
    mask = np.zeros(length, bool)
    mask[list(places)] = True
    return mask


def runs(mask):
    """The beginning and the length of each run of True."""
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    return list(zip(edges[::2], edges[1::2] - edges[::2], strict=True))


@pytest.mark.parametrize("length", [100, 300, 512, 2000])
def test_exactly_so_many_targets_and_none_is_functional(length):
    functional = at(length, 3, 4, length // 2, length - 2, length - 1)
    for seed in range(20):
        targets = sample_targets(functional, np.random.default_rng(seed), num_predict=85)
        assert targets.dtype == bool and targets.shape == (length,)
        assert targets.sum() == 85 and not (targets & functional).any()


def test_all_or_none_can_be_targets():
    functional = at(9, 4, 8)
    assert (sample_targets(functional, np.random.default_rng(0), num_predict=7) == ~functional).all()
    assert not sample_targets(functional, np.random.default_rng(0), num_predict=0).any()


def test_a_span_has_n_tokens_with_chance_1_over_n_and_is_anywhere_in_its_context():
    """The first two spans of rows with room for more, against the chances of each length and place."""
    first, second = Counter(), Counter()
    random = np.random.default_rng(0)
    for _ in range(3000):
        targets = sample_targets(at(200), random, num_predict=15)
        (begin, length), (later, width), *_ = runs(targets)
        first[length, begin] += 1
        second[width, later - 7 * length] += 1
    total = sum(1 / n for n in range(1, 6))
    chances = {(n, place): 1 / n / total / (6 * n) for n in range(1, 6) for place in range(6 * n)}
    for counts in (first, second):
        assert set(counts) <= set(chances)
        assert is_fair([counts[kind] for kind in chances], list(chances.values()))


def sampled_by_hand(functional, random, num_predict, alpha, max_gram):
    """The loop of `_sample_mask` in words: walk on, choose a span, walk on; then make up for what is missing."""
    chances = np.array([1 / n for n in range(1, max_gram + 1)])
    chosen, count, place = set(), 0, 0
    while place < len(functional) and count < num_predict:
        n = min(random.choice(np.arange(1, max_gram + 1), p=chances / chances.sum()), num_predict - count)
        before = random.integers(n * alpha)
        if place + before + n >= len(functional):
            break
        chosen |= set(range(place + before, place + before + n))
        count += n
        place += before + n + (n * alpha - before)
    chosen -= set(np.flatnonzero(functional).tolist())
    while len(chosen) < num_predict:
        other = int(random.integers(len(functional)))
        if not functional[other]:
            chosen.add(other)
    return tuple(sorted(chosen))


@pytest.mark.parametrize(
    ("functional", "num_predict", "alpha", "max_gram"),
    [
        (at(8, 3), 1, 8, 1),
        (at(8), 3, 2, 3),
        (at(9, 2, 8), 3, 1, 3),
        (at(6), 5, 1, 2),
    ],
)
def test_targets_are_as_likely_as_in_the_loop(functional, num_predict, alpha, max_gram):
    def sampled(random):
        targets = sample_targets(functional, random, num_predict=num_predict, alpha=alpha, max_gram=max_gram)
        return tuple(np.flatnonzero(targets).tolist())

    random, number = np.random.default_rng(0), 2500
    counts = Counter(sampled(random) for _ in range(number))
    expected = Counter(sampled_by_hand(functional, random, num_predict, alpha, max_gram) for _ in range(number))
    surprise = sum((counts[kind] - expected[kind]) ** 2 / (counts[kind] + expected[kind]) for kind in counts | expected)
    freedom = len(counts | expected) - 1
    assert surprise < freedom + 6 * np.sqrt(2 * freedom) + 20


def test_the_last_token_is_reached_only_to_make_up():
    """One of eight, in a context of eight: a span must end before the last token, else any token is taken."""
    random = np.random.default_rng(0)
    counts = sum(sample_targets(at(8), random, num_predict=1, alpha=8, max_gram=1).astype(int) for _ in range(5000))
    assert is_fair(counts, [*[1 / 8 + 1 / 64] * 7, 1 / 64])


CASES = [
    (at(6, 1, 3, 4), at(6), None),
    (at(6, 0, 2), at(6, 4, 5), None),
    (at(8, 1, 2, 5, 6), at(8, 3, 7), 4),
    (at(8, 0, 1, 2, 3), at(8, 4, 5, 6, 7), 2),
    (at(5), at(5), None),
    (at(3, 0, 1, 2), at(3), 1),
]


@pytest.mark.parametrize(("is_target", "functional", "size"), CASES)
def test_who_sees_whom_in_words(is_target, functional, size):
    length = len(is_target)
    for seed in range(10):
        permuted = permutation_masks(is_target, functional, np.random.default_rng(seed), size=size)
        assert permuted.positions.tolist() == [place for place in range(length) if is_target[place]]
        order = permuted.order
        for i, j in itertools.product(range(length), repeat=2):
            known_to_all = not is_target[j] and not functional[j]
            knows_only_these = not is_target[i] and not functional[i]
            comes_before = not knows_only_these and not known_to_all and order[j] < order[i]
            may = known_to_all or comes_before
            assert permuted.content[i, j] == (may or i == j)
            assert permuted.query[i, j] == (may and i != j)
        assert permuted.content.dtype == permuted.query.dtype == bool


@pytest.mark.parametrize(("is_target", "functional", "size"), CASES)
def test_the_masks_are_those_of_the_original(is_target, functional, size):
    """`_local_perm`, whose 1 is "may not", and what its model makes of it for the two streams."""
    permuted = permutation_masks(is_target, functional, np.random.default_rng(5), size=size)
    order = permuted.order
    own = np.where(is_target, order, order + 1)
    blocked = (own[:, None] <= order[None, :]) & (is_target | functional)[None, :]
    assert (permuted.query[is_target] == ~blocked[is_target]).all()
    assert (permuted.content == ~(blocked - np.eye(len(order)) > 0)).all()


def test_a_prediction_depends_on_no_target_that_is_to_come():
    """Through any number of layers: content flows along `content`, and at last along `query`."""
    functional = at(12, 5, 11)
    permuted = permutation_masks(at(12, 1, 2, 6, 8), functional, np.random.default_rng(2))
    reached = np.linalg.matrix_power(permuted.content.astype(int), 8) > 0
    reached = permuted.query.astype(int) @ reached.astype(int) > 0
    for place in permuted.positions:
        to_come = permuted.order >= permuted.order[place]
        assert to_come[place] and not reached[place][to_come].any()


def test_targets_and_functional_tokens_come_in_any_order():
    is_target, functional = at(5, 0, 3), at(5, 4)
    counts = Counter()
    for seed in range(1500):
        order = permutation_masks(is_target, functional, np.random.default_rng(seed)).order
        assert (order[[1, 2]] == -1).all() and (order[[0, 3, 4]] >= 0).all()
        counts[tuple(np.argsort(order[[0, 3, 4]]).tolist())] += 1
    assert set(counts) == set(itertools.permutations(range(3)))
    assert is_fair(list(counts.values()), np.full(6, 1 / 6))


def test_blocks_come_from_left_to_right_all_in_one_order():
    seen = Counter()
    for seed in range(600):
        order = permutation_masks(at(9, *range(9)), at(9), np.random.default_rng(seed), size=3).order
        assert sorted(order.tolist()) == list(range(9))
        inside = order.reshape(3, 3) - np.array([[0], [3], [6]])
        assert (inside == inside[:1]).all()
        seen[tuple(inside[0].tolist())] += 1
    assert set(seen) == set(itertools.permutations(range(3)))
    assert is_fair(list(seen.values()), np.full(6, 1 / 6))


def test_a_row_is_a_function_of_its_arguments():
    def row(seed):
        random = np.random.default_rng(seed)
        targets = sample_targets(at(64, 63), random, num_predict=10)
        return permutation_masks(targets, at(64, 63), random)

    assert all(np.array_equal(a, b) for a, b in zip(row(1), row(1), strict=True))
    assert not np.array_equal(row(1).order, row(2).order)


def test_what_cannot_be_is_named():
    random = np.random.default_rng(0)
    with pytest.raises(UserError, match="num_predict=8 is more than the 7 tokens"):
        sample_targets(at(9, 4, 8), random, num_predict=8)
    with pytest.raises(UserError, match="alpha=0 and max_gram=5 must be at least 1"):
        sample_targets(at(9), random, num_predict=3, alpha=0)
    for size in (0, 4):
        with pytest.raises(UserError, match=f"size={size} does not divide the row of 6 tokens"):
            permutation_masks(at(6, 1), at(6), random, size=size)
    with pytest.raises(ValueError, match=r"the functional tokens at \[2\] cannot be targets"):
        permutation_masks(at(6, 1, 2), at(6, 2), random)
    with pytest.raises(ValueError, match=r"is_target has shape \(6,\) but functional has shape \(5,\)"):
        permutation_masks(at(6, 1), at(5), random)
