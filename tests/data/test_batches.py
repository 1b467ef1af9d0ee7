import numpy as np
import pytest

from transformer_jax.data import Batches, BatchingConfig
from transformer_jax.data.batches import _boundaries
from transformer_jax.errors import UserError

PAD = 7


def examples(count=100, seed=0):
    random = np.random.default_rng(seed)
    return [
        {"source": [int(i)] * random.integers(1, 30), "target": [int(i)] * random.integers(2, 20)}
        for i in range(10, 10 + count)
    ]


def batches(count=100, tokens=64, num_buckets=3, **options):
    return Batches(examples(count), BatchingConfig(tokens, num_buckets), pad_id=PAD, **options)


def numbers(batch):
    return sorted(int(row[0]) for row in batch["source"] if row[0] != PAD)


def test_every_epoch_has_every_example_once_in_another_order():
    made = batches()
    epochs = [[numbers(made[e * made.per_epoch + i]) for i in range(made.per_epoch)] for e in range(2)]
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(10, 110))
    assert epochs[0] != epochs[1]


def test_a_batch_is_a_function_of_its_number_and_the_seed():
    made, again, other = batches(seed=3), batches(seed=3), batches(seed=4)
    for number in (57, 3, 12):  # in any order
        for name in ("source", "target", "slot"):
            np.testing.assert_array_equal(made[number][name], again[number][name])
    assert any(numbers(made[i]) != numbers(other[i]) for i in range(5))


def test_rows_are_the_examples_and_padding():
    given = {example["source"][0]: example for example in examples()}
    for _, batch in batches().once():
        for source, target in zip(batch["source"], batch["target"], strict=True):
            if source[0] != PAD:
                example = given[int(source[0])]
                assert [x for x in source if x != PAD] == example["source"]
                assert [x for x in target if x != PAD] == example["target"]
            else:
                assert set(source) | set(target) == {PAD}


def test_there_are_no_more_shapes_than_buckets_and_no_batch_is_too_large():
    made = batches(num_buckets=3, tokens=64)
    shapes = {tuple(x.shape for x in made[i].values()) for i in range(3 * made.per_epoch)}
    assert len(shapes) == 3
    for (rows, width), (_, other), _ in shapes:
        assert rows * max(width, other) <= 64


def test_sets_of_about_the_same_lengths_can_share_their_shapes():
    for seed in (0, 1):
        made = Batches(examples(seed=seed), BatchingConfig(64, 2), pad_id=PAD, width_multiple=16)
        assert {batch["source"].shape[1] % 16 for _, batch in made.once()} == {0}


def test_rows_are_a_multiple_of_the_devices():
    for _, batch in batches(multiple=8).once():
        assert len(batch["source"]) % 8 == 0
        np.testing.assert_array_equal(batch["slot"], np.arange(len(batch["source"])))


@pytest.mark.parametrize("count", [1, 3, 100])
def test_evaluation_sees_every_example_once(count):
    seen = np.concatenate([members for members, _ in batches(count, multiple=4).once()])
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 50])
def test_boundaries_pad_least(count):
    from itertools import combinations

    lengths = np.random.default_rng(1).integers(1, 12, 40)
    values = np.unique(lengths)

    def padded(boundaries):
        return sum(min(b for b in boundaries if b >= length) for length in lengths)

    best = min(
        padded((*inner, values[-1])) for n in range(min(count, len(values))) for inner in combinations(values[:-1], n)
    )
    found = _boundaries(lengths, count)
    assert len(found) <= count
    assert padded(found) == best


def test_mistakes_are_named():
    with pytest.raises(UserError, match="there are no examples"):
        Batches([], BatchingConfig(), pad_id=0)
    with pytest.raises(UserError, match="tokens=0 and num_buckets=4 must be at least 1"):
        BatchingConfig(tokens=0)
