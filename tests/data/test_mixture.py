import pickle
from collections import Counter

import pytest

from transformer_jax.data.dates import Dates
from transformer_jax.data.files import Files
from transformer_jax.data.mixture import Mixture
from transformer_jax.data.records import Records
from transformer_jax.errors import UserError


def records(name: str, size: int) -> Records:
    """Records that are the name of their source and their number: train, and one each in valid and test."""
    return Records([(name, str(number)) for number in range(size)], valid=[(name, "valid")], test=[(name, "test")])


def mixed(sizes, weights):
    sources = [records(str(number), size) for number, size in enumerate(sizes)]
    return [(int(r["source"]), int(r["target"])) for r in Mixture(sources, weights).split("train")]


CASES = [
    ((5, 5), (1, 1)),
    ((7, 1), (3, 1)),
    ((1, 7), (3, 1)),
    ((100, 30, 2), (0.7, 0.2, 0.1)),
    ((10, 10, 10, 10), (1, 1, 1, 1)),
    ((40, 3, 3, 3, 3, 3), (0.9, 0.02, 0.02, 0.02, 0.02, 0.02)),
    ((13, 4, 9), (2, 3, 5)),
    ((3, 2), (1e-2, 0.5)),
    ((50, 50), (1 / 3, 2 / 3)),
    ((9,), (4,)),
]


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_a_source_has_its_share_of_any_first_records_to_within_one(sizes, weights):
    had = Counter()
    for count, (number, _) in enumerate(mixed(sizes, weights), 1):
        had[number] += 1
        for other, weight in enumerate(weights):
            assert abs(had[other] - count * weight / sum(weights)) < 1 + 1e-9


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_a_pass_has_every_record_and_no_more_than_that_takes(sizes, weights):
    sequence = mixed(sizes, weights)
    for number, size in enumerate(sizes):
        indices = [index for other, index in sequence if other == number]
        assert indices == [index % size for index in range(len(indices))] and len(indices) >= size
    number, index = sequence[-1]
    assert index == sizes[number] - 1 and (number, index) not in sequence[:-1]


def test_weights_of_no_simple_proportion_are_met_closely():
    weights = (0.123456789, 3.14159265, 1e-9)
    number, _ = zip(*mixed((400, 10_000, 1), weights), strict=True)
    shares = Counter(number)
    for source in (0, 1):
        assert shares[source] / len(number) == pytest.approx(weights[source] / sum(weights), abs=3e-4)
    assert shares[2] >= 1


def test_a_repeated_source_goes_round():
    assert mixed((1, 3), (1, 1)) == [(0, 0), (1, 0), (0, 0), (1, 1), (0, 0), (1, 2)]


def test_valid_and_test_come_one_after_another_once():
    mixture = Mixture((records("a", 3), Records([("b", "0")]), records("c", 1)), (1, 50, 3))
    for name in ("valid", "test"):
        split = mixture.split(name)
        assert list(split) == [{"source": "a", "target": name}, {"source": "c", "target": name}]
        assert split[-1] == split[1] == split[1:][0]


def test_a_split_is_a_sequence_that_pickles():
    split = Mixture((records("a", 3), Dates(train_size=4)), (1, 1)).split("train")
    assert len(split) == 8 and split[-1] == split[7] == split[6:][1]
    assert list(pickle.loads(pickle.dumps(split))) == list(split)
    with pytest.raises(IndexError):
        split[8]


def test_tags_are_those_of_all_and_the_prompt_is_that_of_the_first():
    german, both = Dates(languages=("de",)), Dates(languages=("fr", "de"))
    mixture = Mixture((german, records("a", 1), both), (1, 1, 1))
    assert mixture.tags() == ("<de>", "<fr>")
    assert mixture.prompt("March 4") == "<de> March 4"
    assert Mixture((records("a", 1), german), (1, 1)).prompt("March 4") == "March 4"


def test_a_mixture_is_a_source_that_can_be_mixed():
    inner = Mixture((records("a", 2), records("b", 2)), (1, 1))
    split = Mixture((inner, records("c", 2)), (2, 1)).split("train")
    assert Counter(record["source"] for record in split) == {"a": 2, "b": 2, "c": 2}
    assert hash(inner) == hash(Mixture([records("a", 2), records("b", 2)], [1, 1]))


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ((), (), "sources is empty"),
        ((records("a", 1),), (1, 2), "there are 1 sources but 2 weights"),
        ((records("a", 1),), (0,), r"weights=\(0,\) must all be above 0"),
        ((records("a", 1),), (float("nan"),), "must all be above 0"),
        ((records("a", 1),), (float("inf"),), "must all be above 0"),
    ],
)
def test_a_field_that_cannot_be_is_named(sources, weights, message):
    with pytest.raises(UserError, match=message):
        Mixture(sources, weights)


def test_a_source_without_records_is_named():
    with pytest.raises(UserError, match=r"sources\[1\] has no records in train"):
        Mixture((records("a", 1), records("b", 0)), (1, 1)).split("train")


def test_an_unknown_split_is_named():
    for data in (records("a", 1), Mixture((records("a", 1),), (1,))):
        with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
            data.split("dev")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_what_is_wrong_in_a_source_of_a_mixture_is_named_with_the_source(tmp_path, split):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\nc\t\n")
    files = Files((path,), valid=(path,))
    mixture = Mixture((records("a", 3), Mixture((records("b", 1), files), (1, 1))), (1, 1))
    message = r"sources\[1\]: sources\[1\]: .*pairs\.tsv, line 2 has an empty target; remove the record"
    with pytest.raises(UserError, match=message):
        list(mixture.split(split))
