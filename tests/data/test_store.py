import pickle

import numpy as np
import pytest

from transformer_jax.data.store import Store

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
        Store.write(tmp_path / "store", stops(), vocab_size=100)
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
