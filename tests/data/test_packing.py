from itertools import product

import numpy as np
import pytest

from transformer_jax.data.packing import pack


def fewest_rows(lengths, capacity):
    """By trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for rows in product(range(count), repeat=len(lengths)):
            used = np.zeros((count, lengths.shape[1]), int)
            np.add.at(used, list(rows), lengths)
            if (used <= capacity).all():
                return count
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_no_row_overflows_and_few_are_used(seed):
    random = np.random.default_rng(seed)
    lengths, capacity = random.integers(1, 8, (7, 2)), np.array([9, 8])
    row_of = pack(lengths, capacity)
    used = np.zeros((row_of.max() + 1, 2), int)
    np.add.at(used, row_of, lengths)
    assert (used <= capacity).all() and used.any(axis=1).all()
    assert len(used) <= fewest_rows(lengths, capacity) + 1


def test_equal_lengths_fill_rows_to_the_brim():
    assert np.bincount(pack(np.full((1000, 1), 4), np.array([16]))).tolist() == [4] * 250


def test_nothing_and_what_is_too_long():
    assert pack(np.zeros((0, 2), int), np.array([4, 4])).tolist() == []
    with pytest.raises(ValueError, match=r"an example has lengths \[3 5\]"):
        pack(np.array([[1, 1], [3, 5]]), np.array([4, 4]))
