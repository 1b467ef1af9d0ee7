import pickle

import numpy as np
import pytest

from transformer_jax.data.store import Store
from transformer_jax.errors import UserError

EXAMPLES = [{"source": [5, 6, 70_000], "target": [1]}, {"source": [], "target": [2, 3]}, {"source": [9], "target": []}]


def lists(store):
    return [{name: list(map(int, ids)) for name, ids in example.items()} for example in store]


@pytest.mark.parametrize(("vocab_size", "size"), [(2**16, 2), (2**16 + 1, 4)])
def test_what_was_written_is_read(tmp_path, vocab_size, size):
    examples = [{name: [x % vocab_size for x in ids] for name, ids in e.items()} for e in EXAMPLES]
    store = Store.write(tmp_path / "store", [examples[:1], [], examples[1:]], vocab_size=vocab_size)
    for read in (store, Store.open(tmp_path / "store"), pickle.loads(pickle.dumps(store)), Store.of(examples)):
        assert lists(read) == examples
        assert read.lengths.tolist() == [[3, 1], [0, 2], [1, 0]]
        assert lists([read[-1]]) == examples[-1:] and lists(read[:2]) == examples[:2]
    assert (tmp_path / "store" / "source.ids").stat().st_size == 4 * size
    with pytest.raises(IndexError):
        store[3]


def test_a_store_that_was_cut_short_is_none(tmp_path):
    def stops():
        yield EXAMPLES[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store.write(tmp_path / "store", stops(), vocab_size=10**6)
    assert not (tmp_path / "store").exists()
    assert len(Store.write(tmp_path / "store", [EXAMPLES], vocab_size=10**6)) == 3


def test_nothing_is_a_store_too(tmp_path):
    assert len(Store.write(tmp_path / "store", [], vocab_size=10)) == 0
    assert len(Store.of([])) == 0


def test_a_store_on_disk_is_mapped(tmp_path):
    store = Store.write(tmp_path / "store", [EXAMPLES], vocab_size=10**6)
    base = store.ids["source"]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize(
    ("ids", "vocab_size", "message"),
    [
        ([1, -100], 100, r"example 3 has -100 in 'target'; .* from 0 to 65535"),
        ([2**16], 2**16, r"example 3 has 65536 in 'target'; .* from 0 to 65535"),
        ([-1], 2**20, r"example 3 has -1 in 'target'; .* from 0 to 2147483647"),
        ([2**31], 2**20, r"example 3 has 2147483648 in 'target'; .* to 2147483647"),
        (np.array([2**32 + 5]), 2**20, r"example 3 has 4294967301 in 'target'; .* to 2147483647"),
        (np.array([2**64 - 1], np.uint64), 2**20, r"example 3 has 18446744073709551615 in 'target'"),
        ([10**30], 2**20, r"example 3 has 10{30} in 'target'"),
        ([1, 1.7], 100, r"example 3 has 1.7 in 'target'; .* integers"),
        (np.array([1.0, np.nan]), 100, r"example 3 has 1.0 in 'target'; .* integers"),
        (["a"], 100, r"example 3 has 'a' in 'target'; .* integers"),
        ([None], 100, r"example 3 has None in 'target'; .* integers"),
        ([[1, 2]], 100, r"example 3 has \[1, 2\] in 'target'; .* integers"),
        ([[1, 2], [3]], 100, r"example 3 has \[1, 2\] in 'target'; .* integers"),
    ],
)
def test_a_value_that_would_not_be_stored_as_it_is_is_named(tmp_path, ids, vocab_size, message):
    good = {"source": [0, min(vocab_size, 2**16) - 1], "target": [5]}
    parts = [[good, good], [good, {"source": [], "target": ids}]]
    with pytest.raises(UserError, match=message) as caught:
        Store.write(tmp_path / "store", parts, vocab_size=vocab_size)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_in_memory_a_negative_label_is_kept_and_what_does_not_fit_is_named():
    assert lists(Store.of([{"label": [-100, 3]}])) == [{"label": [-100, 3]}]
    with pytest.raises(UserError, match=r"example 1 has 1.5 in 'label'"):
        Store.of([{"label": []}, {"label": np.array([1.5], np.float32)}])
    with pytest.raises(UserError, match=r"example 0 has 4294967295 in 'label'"):
        Store.of([{"label": np.array([2**32 - 1], np.uint32)}])
