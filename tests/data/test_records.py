import json
import pickle
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.data import Records
from transformer_jax.errors import UserError


def test_pairs_have_a_source_and_a_target():
    data = Records(train=[["a", "b"], ("c", "d")], valid=[("e", "f")])
    assert data.split("train") == [{"source": "a", "target": "b"}, {"source": "c", "target": "d"}]
    assert data.split("valid") == [{"source": "e", "target": "f"}] and data.split("test") == []
    assert data.tags() == () and data.prompt("text") == "text" and data.fields() == ("source", "target")


def test_records_of_any_fields():
    labelled = Records(train=[("a great film", "good")], fields=("text", "label"))
    assert labelled.split("train") == [{"text": "a great film", "label": "good"}]
    assert labelled.fields() == ("text", "label")
    dicts = Records(valid=[{"text": "a", "stars": 5, "image": np.zeros(2)}])
    assert dicts.fields() == ("text", "stars", "image") and dicts.split("valid")[0]["stars"] == 5
    assert Records(train=[{"text": "a", "more": 1}], fields=("text",)).split("train") == [{"text": "a", "more": 1}]
    assert replace(labelled, valid=[("b", "bad")]).split("valid") == [{"text": "b", "label": "bad"}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("ab", r"valid\[1\] is 'ab'; give a tuple of 2 values \(source, target\) or a dict"),
        (("a",), r"valid\[1\] is \('a',\); give a tuple of 2 values"),
        (
            ("a", "b", "c"),
            r"valid\[1\] is \('a', 'b', 'c'\); give a tuple of 2 values .* or name the fields with fields=",
        ),
        (None, r"valid\[1\] is None; give"),
        ({"source": "a", "text": "b"}, r"valid\[1\] has no 'target', but source, text; the fields are source, target"),
        ("x" * 100, r"valid\[1\] is 'x{39}…; give"),
        (("a", ""), r"valid\[1\] has an empty target; remove the record"),
        ((" ", "b"), r"valid\[1\] has an empty source"),
        (("a", "\ud83d"), r"valid\[1\] has '\\ud83d' in 'target', which is not a character"),
    ],
)
def test_a_record_that_does_not_fit_is_named(record, message):
    with pytest.raises(UserError, match=message):
        Records(train=[], valid=[("a", "b"), record])


def test_empty_records_can_be_kept():
    assert Records(train=[("a", "")], allow_empty=True).split("train") == [{"source": "a", "target": ""}]


def test_equal_records_are_equal_and_others_are_not():
    def image(last=1.0):
        return [{"image": np.array([[0.5, last]], np.float32), "tags": ["a", "b"], "label": 3}]

    assert Records(train=[("a", "b")]) == Records((["a", "b"],)) == Records([{"source": "a", "target": "b"}])
    assert Records(image()) == Records(image()) and hash(Records(image())) == hash(Records(image()))
    assert len({Records(image()), Records(image()), Records(image(last=1.5))}) == 2
    others = [
        Records(train=[("a", "b")]),
        Records(train=[("ab", "c")]),
        Records(train=[("a", "bc")]),
        Records(train=[("a", "b"), ("c", "d")]),
        Records(train=[("a", "b")], valid=[("c", "d")]),
        Records(train=[("a", "b")], test=[("c", "d")]),
        Records(train=[("a", "b")], fields=("text", "label")),
        Records(train=[("a", "b")], allow_empty=True),
        Records(train=[("a", ["b"])]),
        Records(train=[("a", ["b", "c"])]),
        Records(train=[("a", ["bc"])]),
        Records(train=[("a", {"b": 1})]),
        Records(train=[("1", "b")]),
        Records(train=[(1, "b")]),
        Records(train=[(1.0, "b")]),
        Records(train=[(True, "b")]),
        Records(train=[(None, "b")]),
        Records(train=[(b"a", "b")]),
        Records(train=[(np.zeros(2, np.int32), "b")]),
        Records(train=[(np.zeros(2, np.float32), "b")]),
        Records(train=[(np.zeros((1, 2), np.int32), "b")]),
    ]
    assert len(set(others)) == len(others) == len({json.dumps(other.to_json()) for other in others})
    assert Records(train=[(np.int64(1), "b")]) == Records(train=[(1, "b")])


def test_a_value_without_a_digest_is_named():
    with pytest.raises(UserError, match="in a record is a object; give texts, numbers, lists or arrays"):
        hash(Records(train=[(object(), "b")]))


def test_a_config_keeps_a_digest_and_not_the_records():
    data = Records(train=[("secret", "b"), ("c", "d")], valid=[("e", "f")])
    kept = json.loads(json.dumps(data.to_json()))
    assert kept.pop("digest").isalnum()
    assert kept == {"fields": ["source", "target"], "train": 2, "valid": 1, "test": 0, "allow_empty": False}
    assert "secret" not in json.dumps(data.to_json())
    again = Records.from_json(json.loads(json.dumps(data.to_json())))
    for read in (again, pickle.loads(pickle.dumps(again))):
        assert read == data and hash(read) == hash(data) and read.to_json() == data.to_json()
        assert read.fields() == ("source", "target")
        for split in ("train", "test"):
            with pytest.raises(
                UserError, match=r"the 3 records of this run were given in memory and are not kept; give"
            ):
                read.split(split)
    assert again != Records(train=[("secret", "b"), ("c", "x")], valid=[("e", "f")])
    assert Records.from_json(Records().to_json()).split("train") == []
