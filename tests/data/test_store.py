import pickle

import numpy as np
import pytest

from transformer_jax.data.columns import Column, token_column
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError

EXAMPLES = [{"source": [5, 6, 70_000], "target": [1]}, {"source": [], "target": [2, 3]}, {"source": [9], "target": []}]


def tokens(num_ids):
    return dict.fromkeys(("source", "target"), token_column(num_ids, pad_id=0))


def lists(store):
    return [{name: value.tolist() for name, value in example.items()} for example in store]


@pytest.mark.parametrize(("num_ids", "size"), [(2**8, 1), (2**16, 2), (2**16 + 1, 4)])
def test_what_was_written_is_read(tmp_path, num_ids, size):
    examples = [{name: [x % num_ids for x in ids] for name, ids in e.items()} for e in EXAMPLES]
    columns = tokens(num_ids)
    store = Store.write(tmp_path / "store", [examples[:1], [], examples[1:]], columns)
    for read in (store, Store.open(tmp_path / "store"), pickle.loads(pickle.dumps(store)), Store.of(examples, columns)):
        assert lists(read) == examples and read.columns == columns
        assert read.lengths.tolist() == [[3, 1], [0, 2], [1, 0]]
        assert lists([read[-1]]) == examples[-1:] and lists(read[:2]) == examples[:2]
    assert (tmp_path / "store" / "source.values").stat().st_size == 4 * size
    with pytest.raises(IndexError):
        store[3]


def test_columns_keep_their_types_and_shapes(tmp_path):
    columns = {
        "frames": Column("float32", (80,)),
        "image": Column("uint8", (28, 28, 1), ragged=False),
        "tags": Column("int32", padding=-100, limits=(-100, 9)),
        "label": Column("int32", ragged=False, limits=(0, 1)),
        "is_last": Column("bool", ragged=False),
    }
    random = np.random.default_rng(0)
    examples = [
        {
            "frames": random.normal(size=(n, 80)).astype(np.float32),
            "image": random.integers(0, 256, (28, 28, 1), dtype=np.uint8),
            "tags": [-100, 3][:n],
            "label": n % 2,
            "is_last": n == 2,
        }
        for n in (0, 1, 2)
    ]
    written = Store.write(tmp_path / "store", [examples[:2], examples[2:]], columns)
    for read in (written, pickle.loads(pickle.dumps(written)), Store.of(examples, columns)):
        assert read.columns == columns and read.lengths.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert [read.values[name].dtype.name for name in columns] == ["float32", "uint8", "int8", "uint8", "bool"]
        for example, given in zip(read, examples, strict=True):
            for name, value in given.items():
                np.testing.assert_array_equal(example[name], np.asarray(value).reshape(example[name].shape))
        assert read[0]["frames"].shape == (0, 80) and read[0]["image"].shape == (28, 28, 1)


def test_only_the_columns_that_examples_have_are_kept_in_memory_and_all_are_needed_on_disk(tmp_path):
    """What is predicted for has no target."""
    assert [*Store.of([{"source": [1]}], tokens(9)).columns] == ["source"]
    with pytest.raises(UserError, match="example 1 has source, target; the columns of the task are source"):
        Store.of([{"source": [1]}, {"source": [1], "target": [2]}], tokens(9))
    with pytest.raises(UserError, match="example 0 has source; the columns of the task are source, target"):
        Store.write(tmp_path / "store", [[{"source": [1]}]], tokens(9))


def test_a_store_that_was_cut_short_is_none(tmp_path):
    def stops():
        yield EXAMPLES[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Store.write(tmp_path / "store", stops(), tokens(10**6))
    assert not (tmp_path / "store").exists()
    assert len(Store.write(tmp_path / "store", [EXAMPLES], tokens(10**6))) == 3


def test_nothing_is_a_store_too(tmp_path):
    for store in (Store.write(tmp_path / "store", [], tokens(10)), Store.of([], tokens(10))):
        assert len(store) == 0 and list(store) == [] and store.lengths.shape == (0, 2)


def test_a_store_on_disk_is_mapped(tmp_path):
    store = Store.write(tmp_path / "store", [EXAMPLES], tokens(10**6))
    base = store.values["source"]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


LABEL = Column("int32", ragged=False, limits=(0, 3))
FRAMES = Column("float16", (2,))
WRONG = [
    (token_column(2**16, 0), [1, -100], r"has -100 in 'x'; give integers from 0 to 65535"),
    (token_column(2**16, 0), [2**16], r"has 65536 in 'x'; give integers from 0 to 65535"),
    (token_column(100, 0), [100], r"has 100 in 'x'; give integers from 0 to 99"),
    (Column(), [2**31], r"has 2147483648 in 'x'; .* to 2147483647"),
    (Column(), np.array([2**32 + 5]), r"has 4294967301 in 'x'; .* to 2147483647"),
    (Column(), np.array([2**64 - 1], np.uint64), r"has 18446744073709551615 in 'x'"),
    (Column(), [10**30], r"has 10{30} in 'x'"),
    (Column(), [1, 1.7], r"has 1.7 in 'x'; .* integers"),
    (Column(), np.array([1.0, np.nan]), r"has 1.0 in 'x'; .* integers"),
    (Column(), ["a"], r"has 'a' in 'x'; .* integers"),
    (Column(), "a", r"has an array of shape \(\) as 'x'; give items of shape \(\)"),
    (Column(), 5, r"has an array of shape \(\) as 'x'; give items of shape \(\)"),
    (Column(), [None], r"has None in 'x'; .* integers"),
    (Column(), [[1, 2]], r"has an array of shape \(1, 2\) as 'x'; give items of shape \(\)"),
    (Column(), [[1, 2], [3]], r"has \[1, 2\] in 'x'; .* integers"),
    (LABEL, 4, r"has 4 in 'x'; give integers from 0 to 3"),
    (LABEL, -100, r"has -100 in 'x'; give integers from 0 to 3"),
    (LABEL, None, r"has None in 'x'; give integers from 0 to 3"),
    (LABEL, "good", r"has 'good' in 'x'; give integers from 0 to 3"),
    (LABEL, [1], r"has an array of shape \(1,\) as 'x'; give one value of shape \(\)"),
    (FRAMES, np.zeros((3, 4)), r"has an array of shape \(3, 4\) as 'x'; give items of shape \(2,\)"),
    (FRAMES, [[0.0, 70_000.0]], r"has 70000.0 in 'x'; give numbers that float16 can hold"),
    (FRAMES, [["a", "b"]], r"has 'a' in 'x'; give numbers that float16 can hold"),
    (Column("uint8", (1,)), [[256]], r"has 256 in 'x'; give integers from 0 to 255"),
    (Column("uint8", (1,)), [[0.5]], r"has 0.5 in 'x'; give integers from 0 to 255"),
    (Column("bool", ragged=False), 1, r"has 1 in 'x'; give True or False"),
]


@pytest.mark.parametrize(("column", "value", "message"), WRONG)
def test_a_value_that_would_not_be_stored_as_it_is_is_named(tmp_path, column, value, message):
    item = np.zeros(column.shape, bool if column.dtype == "bool" else int)
    good = {"x": [item, item] if column.ragged else item}
    with pytest.raises(UserError, match=f"example 3 {message}") as caught:
        Store.write(tmp_path / "store", [[good, good], [good, {"x": value}]], {"x": column})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()
    with pytest.raises(UserError, match=f"example 1 {message}"):
        Store.of([good, {"x": value}], {"x": column})


def test_what_is_not_a_number_is_one_of_the_values_of_a_float_column():
    values = [float("nan"), float("inf"), 0.1]
    np.testing.assert_array_equal(Store.of([{"x": values}], {"x": Column("float32")})[0]["x"], np.float32(values))


def test_limits_are_of_integers():
    with pytest.raises(ValueError, match="are of integers, and dtype is float32"):
        Column("float32", limits=(0, 1))
