import pickle
from itertools import pairwise

import numpy as np
import pytest

from transformer_jax.data import Text, Tokenizer, TokenizerConfig
from transformer_jax.data.batches import Batches, Shard
from transformer_jax.data.chunks import Chunks
from transformer_jax.data.columns import Column, token_column
from transformer_jax.data.rows import BatchingConfig, Rows, _boundaries
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError

PAD = 7
ONLY = Shard()
IDS = Column(padding=PAD)
PAIR = {"source": IDS, "target": IDS}
TEXT = {"text": IDS}


def examples(count=100, seed=0):
    random = np.random.default_rng(seed)
    return [
        {"source": [int(i)] * random.integers(1, 30), "target": [int(i)] * random.integers(2, 20)}
        for i in range(10, 10 + count)
    ]


def rows(count=100, tokens=64, num_buckets=3, pack_length=None, width_multiple=1, seed=0):
    config = BatchingConfig(tokens, num_buckets=num_buckets, pack_length=pack_length)
    return Rows(Store.of(examples(count, seed), PAIR), config, width_multiple=width_multiple)


def batches(*args, seed=0, multiple=1, shard=ONLY, **options):
    return Batches(rows(*args, **options), seed=seed, multiple=multiple, shard=shard)


def numbers(batch):
    return sorted({int(x) for x in batch["source"].flat if x != PAD})


LAYOUTS = [{}, {"pack_length": 32}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_epoch_has_every_example_once_in_another_order(layout):
    made = batches(**layout)
    epochs = [[numbers(made[e * made.per_epoch + i]) for i in range(made.per_epoch)] for e in range(2)]
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(10, 110))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_a_function_of_its_number_and_the_seed(layout):
    made, again, other = (batches(seed=seed, **layout) for seed in (3, 3, 4))
    for number in (57, 3, 12):  # in any order
        assert made[number].keys() == again[number].keys()
        for name, array in made[number].items():
            np.testing.assert_array_equal(array, again[number][name])
    assert any(numbers(made[i]) != numbers(other[i]) for i in range(5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [2, 4])
def test_processes_make_their_shards_of_the_same_batches(layout, count):
    whole = batches(multiple=4, seed=1, **layout)
    shards = [batches(multiple=4, seed=1, shard=Shard(index, count), **layout) for index in range(count)]
    for number in (0, 5, whole.per_epoch + 3):
        for name, array in whole[number].items():
            np.testing.assert_array_equal(array, np.concatenate([shard[number][name] for shard in shards]))
    for (indices, all_rows), *parts in zip(*(made.once() for made in (whole, *shards)), strict=True):
        np.testing.assert_array_equal(all_rows["source"], np.concatenate([batch["source"] for _, batch in parts]))
        for known, _ in parts:  # what each gathers is of the whole batch
            np.testing.assert_array_equal(known, indices)


def test_a_process_may_make_shards_that_do_not_lie_together():
    whole = batches(multiple=8, seed=1)
    parts = [batches(multiple=8, seed=1, shard=Shard(index, 8)) for index in ((0, 3, 5), (1, 2, 4, 6, 7))]
    for number in (0, 5, whole.per_epoch - 1):
        rows = np.concatenate([part[number]["source"] for part in parts])
        slots = np.concatenate([part[number]["slot"] for part in parts])
        np.testing.assert_array_equal(rows[np.argsort(slots)], whole[number]["source"])


def test_a_worker_process_makes_the_same_batches():
    made = batches(pack_length=32)
    again = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(made[5]["target"], again[5]["target"])


@pytest.mark.parametrize("kind", ["rows", "chunks"])
def test_a_worker_process_maps_the_examples_and_is_not_sent_them(tmp_path, kind):
    store = Store.write(tmp_path / "store", [[{"text": [n % 100] * 100} for n in range(1000)]], TEXT)
    layouts = {
        "rows": lambda: Rows(store, BatchingConfig(1000)),
        "chunks": lambda: Chunks(store, length=64, batch_rows=4),
    }
    made = Batches(layouts[kind]())
    pickled = pickle.dumps(made)
    assert len(pickled) < 25_000
    np.testing.assert_array_equal(made[5]["text"], pickle.loads(pickled)[5]["text"])


def test_rows_are_the_examples_and_padding():
    given, seen = {example["source"][0]: example for example in examples()}, []
    for _, batch in batches().once():
        for source, target in zip(batch["source"], batch["target"], strict=True):
            if source[0] != PAD:
                example = given[int(source[0])]
                assert [x for x in source if x != PAD] == example["source"]
                assert [x for x in target if x != PAD] == example["target"]
                seen.append(int(source[0]))
            else:
                assert set(source) | set(target) == {PAD}
    assert sorted(seen) == sorted(given)


def test_a_packed_row_tells_its_examples_apart():
    given = {example["source"][0]: example for example in examples()}
    shared = 0
    for _, batch in batches(pack_length=32).once():
        for source, target, *segments in zip(
            *(batch[name] for name in ("source", "target", "source_segments", "target_segments")), strict=True
        ):
            count = max(segments[0])
            shared += count > 1
            for segment in range(1, count + 1):
                a, b = source[segments[0] == segment], target[segments[1] == segment]
                assert (list(a), list(b)) == tuple(given[int(a[0])].values())
            for ids, segment in zip((source, target), segments, strict=True):
                assert set(ids[segment == 0]) <= {PAD}
                assert list(segment[segment > 0]) == sorted(segment[segment > 0])
    assert shared > 20


def test_packing_pads_little_and_says_how_much():
    random = np.random.default_rng(0)
    lengths = random.geometric(0.1, (2000, 1)) + random.integers(0, 4, (2000, 2))
    store = Store.of([{"source": [0] * s, "target": [0] * t} for s, t in np.minimum(lengths, 60)], PAIR)
    packed = Rows(store, BatchingConfig(1024, pack_length=64))
    made = [batch for _, batch in Batches(packed).once()]
    used = sum((batch[f"{name}_segments"] > 0).sum() for batch in made for name in ("source", "target"))
    rows_used = sum((batch["source_segments"] > 0).any(1).sum() for batch in made)
    assert used == np.minimum(lengths, 60).sum()
    assert packed.padding == pytest.approx(1 - used / (rows_used * 128)) and packed.padding < 0.05
    alone = Rows(store, BatchingConfig(1024, num_buckets=1))
    assert alone.padding == pytest.approx(
        1 - np.minimum(lengths, 60).sum() / (2000 * np.minimum(lengths, 60).max(0).sum())
    )


def test_what_is_too_long_for_a_packed_row_has_rows_of_its_own():
    store = Store.of([{"text": [1] * n} for n in (3, 4, 40, 2, 5, 1, 25)], TEXT)
    layout = Rows(store, BatchingConfig(64, pack_length=8))
    assert [batch["text"].shape for _, batch in Batches(layout).once()] == [(8, 8), (1, 40), (1, 40)]
    assert layout.members is None  # a row is not one example


def test_there_are_no_more_shapes_than_buckets_and_no_batch_is_too_large():
    made = batches(num_buckets=3, tokens=64)
    shapes = {tuple(made[i][name].shape for name in PAIR) for i in range(3 * made.per_epoch)}
    assert len(shapes) == 3
    for (count, width), (_, other) in shapes:
        assert count * max(width, other) <= 64


def test_batches_of_a_number_of_rows():
    layout = Rows(Store.of(examples(), PAIR), BatchingConfig(64, rows=5, num_buckets=2))
    assert {len(batch["slot"]) for _, batch in Batches(layout).once()} == {5}


def test_sets_of_about_the_same_lengths_can_share_their_shapes():
    for seed in (0, 1):
        made = Batches(rows(seed=seed, num_buckets=2, width_multiple=16))
        assert {batch["source"].shape[1] % 16 for _, batch in made.once()} == {0}


def test_rows_are_a_multiple_of_the_devices():
    for _, batch in batches(multiple=8).once():
        assert len(batch["source"]) % 8 == 0
        np.testing.assert_array_equal(batch["slot"], np.arange(len(batch["source"])))


@pytest.mark.parametrize("count", [1, 3, 100])
def test_evaluation_sees_every_example_once(count):
    layout = rows(count)
    seen = np.concatenate([indices for indices, _ in Batches(layout, multiple=4).once()])
    assert sorted(layout.members[seen]) == list(range(count))


def test_what_is_too_long_for_the_model_is_left_out_or_cut_to_its_beginning_and_its_end():
    given = [{"source": list(range(1, n + 1)), "target": [1]} for n in (3, 5, 4, 9)]
    store, config = Store.of(given, PAIR), BatchingConfig(64, num_buckets=1)
    without = Rows(store, config, max_lengths={"source": 4})
    assert without.members.tolist() == [0, 2]
    assert without.describe() == "2 examples (2 that are too long for the model are left out), 10.0% padding"
    cut = Rows(store, config, max_lengths={"source": 4}, too_long="cut")
    ((_, batch),) = Batches(cut).once()
    assert batch["source"][:4].tolist() == [[1, 2, 3, PAD], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 3, 9]]


def test_columns_of_several_types_lie_side_by_side():
    """Each with its own type, shape and padding; one without a length has one item for each example of a packed row."""
    columns = {
        "frames": Column("float32", (2,), padding=-1),
        "text": IDS,
        "tags": Column("int16", padding=-100),
        "image": Column("uint8", (2, 1), ragged=False, padding=255),
        "label": Column("int32", ragged=False, padding=-100),
    }
    given = [
        {
            "frames": np.full((n, 2), n / 2),
            "text": [n] * n,
            "tags": [n] * (n + 1),
            "image": np.full((2, 1), n),
            "label": n,
        }
        for n in (2, 1, 3)
    ]
    store = Store.of(given, columns)
    packed = Rows(store, BatchingConfig(9, pack_length=9))
    ((_, batch),) = Batches(packed).once()
    assert {name: batch[name].dtype.name for name in columns} == {name: c.dtype for name, c in columns.items()}
    order = batch["label"][0].tolist()
    assert sorted(order) == [1, 2, 3] and batch["label"].shape == (1, 3)
    for slot, n in enumerate(order):
        assert batch["image"][0, slot].tolist() == [[n], [n]]
        for name, count in (("frames", n), ("text", n), ("tags", n + 1)):
            inside = batch[name][0][batch[f"{name}_segments"][0] == slot + 1]
            assert len(inside) == count and (inside == (n / 2 if name == "frames" else n)).all()
    for name, column in columns.items():
        if column.ragged:
            assert (batch[name][0][batch[f"{name}_segments"][0] == 0] == column.padding).all()
    alone = Batches(Rows(store, BatchingConfig(rows=2, num_buckets=1)))
    empty = [batch for _, batch in alone.once()][-1]
    assert (
        empty["label"].tolist()[1:] == [-100] and (empty["image"][1] == 255).all() and (empty["tags"][1] == -100).all()
    )
    assert "label_segments" not in empty and (empty["frames"][1] == -1).all()


def test_examples_without_a_length_need_a_number_of_rows():
    store = Store.of([{"image": np.zeros((2, 2))}] * 3, {"image": Column("float32", (2, 2), ragged=False)})
    assert [batch["image"].shape for _, batch in Batches(Rows(store, BatchingConfig(rows=2))).once()] == [(2, 2, 2)] * 2
    with pytest.raises(UserError, match=r"no length to go by; set batching.rows"):
        Rows(store, BatchingConfig())
    with pytest.raises(UserError, match=r"cannot be packed; leave out batching.pack_length"):
        Rows(store, BatchingConfig(rows=2, pack_length=4))


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


DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [], [12, 13, 14, 15]]


def test_chunks_predict_every_id_of_the_stream_once_and_know_its_document():
    layout = Chunks(
        Store.of([{"text": document} for document in DOCUMENTS], {"text": Column()}), length=4, batch_rows=2
    )
    stream = [x for document in DOCUMENTS for x in document]
    document_of = {x: number for number, document in enumerate(DOCUMENTS) for x in document}
    predicted = []
    for _, batch in Batches(layout).once():
        for ids, segments in zip(batch["text"], batch["text_segments"], strict=True):
            predicted += [int(x) for x in ids[1:] if x]
            real = [(int(x), int(s)) for x, s in zip(ids, segments, strict=True) if x]
            assert real == [] or real[0][1] == 1
            for (a, i), (b, j) in pairwise(real):
                assert j - i == (document_of[a] != document_of[b])
            assert set(segments[ids == 0]) <= {0}
    assert predicted == stream[1:]


def test_chunks_cut_columns_of_a_document_alike():
    columns = {"text": IDS, "weights": Column("float32"), "label": Column(ragged=False)}
    given = [{"text": [n] * n, "weights": [n / 2] * n, "label": n} for n in (3, 4)]
    layout = Chunks(Store.of(given, columns), length=4, batch_rows=2)
    ((_, batch),) = Batches(layout).once()
    assert batch["text"].tolist() == [[3, 3, 3, 4, 4], [4, 4, 4, PAD, PAD]] and "label" not in batch
    np.testing.assert_array_equal(batch["weights"], np.where(batch["text"] == PAD, 0, batch["text"] / 2))
    with pytest.raises(UserError, match="'text' and 'weights' of a document must have the same length"):
        Chunks(Store.of([{"text": [1], "weights": [1.0, 2.0]}], columns), length=4, batch_rows=2)


@pytest.mark.parametrize("kind", ["bytes", "characters", "byte_bpe"])
def test_text_becomes_rows_and_text_again(tmp_path, kind):
    documents = ["Ein Haus.", "二つの家", "three houses, and\u2028more", "四"]
    (tmp_path / "text").write_text("".join(f"{document}\n" for document in documents), encoding="utf-8")
    records = Text(train=(tmp_path / "text",), document="line", valid_fraction=0.0).split("train")
    tokenizer = Tokenizer.train(documents, TokenizerConfig(kind=kind, vocab_size=300))
    encoded = tokenizer.encode([record["text"] for record in records])
    columns = {"text": token_column(tokenizer.vocab_size, tokenizer.pad_id)}
    store = Store.of([{"text": [*ids, tokenizer.end_id]} for ids in encoded], columns)
    layout = Chunks(store, length=8, batch_rows=2)
    stream = [int(ids[0]) for ids in layout.rows(0, np.array([0]), 1, None)["text"]]
    stream += [int(x) for _, batch in Batches(layout).once() for ids in batch["text"] for x in ids[1:]]
    stream = stream[: len(store.values["text"])]
    assert "".join(tokenizer.decode([stream])) == "".join(documents)
    assert stream.count(tokenizer.end_id) == len(documents)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="there are no examples"):
        Batches(Rows(Store.of([], TEXT), BatchingConfig()))
    with pytest.raises(UserError, match="tokens must be at least 1; got 0"):
        BatchingConfig(tokens=0)
    with pytest.raises(ValueError, match="do not divide into 2 shards"):
        batches(multiple=1, shard=Shard(0, 2))
