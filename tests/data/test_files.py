import json
import pickle
from pathlib import Path

import pytest

from transformer_jax.data.files import Files
from transformer_jax.errors import UserError

PAIRS = [
    ("He said \u201cyes\u201d\u2028and left\x85", "قال نعم"),
    ('a "quote" left open', "एक वाक्य"),
    ("a form feed\x0c a lone\rreturn", "一句中文"),
    ("😀", " é "),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_bytes(text.encode())
        return tmp_path / name

    return write


@pytest.fixture
def numbered(write):
    """Makes a TSV file of so many records, which are their numbers."""
    return lambda total, name="n.tsv": write(name, "".join(f"{number}\t{-number}\n" for number in range(total)))


def records(pairs):
    return [{"source": source, "target": target} for source, target in pairs]


def numbers(split) -> list[int]:
    return [int(record["source"]) for record in split]


def test_two_files_correspond_line_by_line(write):
    sources = write("train.en", "\n".join(source for source, _ in PAIRS))
    targets = write("train.xx", "".join(f"{target}\r\n" for _, target in PAIRS))
    assert list(Files(train=(sources, targets)).split("train")) == records(PAIRS)


@pytest.mark.parametrize(
    ("columns", "fields"),
    [
        ({"question": "q", "answer": "a"}, ("question", "answer")),
        ({"question": 0, "answer": 1}, ("question", "answer")),
        ({"answer": "1", "question": "0"}, ("question", "answer")),
        ({"answer": "", "question": ""}, ("answer", "question")),
    ],
)
def test_two_files_give_the_fields_in_their_order(write, columns, fields):
    data = Files((write("a", "1\n2\n"), write("b", "x\ny\n")), columns=columns)
    assert list(data.split("train")) == [dict(zip(fields, pair, strict=True)) for pair in (("1", "x"), ("2", "y"))]
    assert set(data.fields()) == set(fields)


def test_two_files_have_two_fields(write):
    paths = write("a", "1\n"), write("b", "x\n")
    with pytest.raises(UserError, match=r"columns names text, but .*a and .*b are two files of one field each"):
        Files(paths, columns={"text": "0"}).split("train")


def test_what_is_no_text_in_an_object_is_kept_as_it_is(write):
    path = write("n.jsonl", '{"t": "a", "y": 3, "tags": ["O", "B"], "z": null, "w": 1.5}\n')
    columns = {"text": "t", "label": "y", "tags": "tags", "none": "z", "weight": "w"}
    (record,) = Files(path, columns=columns).split("train")
    assert record == {"text": "a", "label": 3, "tags": ["O", "B"], "none": None, "weight": 1.5}


@pytest.mark.parametrize("suffix", [".tsv", ".tab", ".TSV"])
def test_columns_are_parted_by_tabs_and_nothing_else(write, suffix):
    path = write(f"pairs{suffix}", "".join(f"{source}\t{target}\tmore\n" for source, target in PAIRS))
    assert list(Files(train=(path,)).split("train")) == records(PAIRS)
    data = Files(train=(path,), columns={"text": "2", "label": 0})
    assert data.split("train")[1] == {"text": "more", "label": PAIRS[1][0]} and data.fields() == ("text", "label")


def test_a_named_column_makes_the_first_line_a_header(write):
    path = write("pairs.tsv", "id\tde\ten\n7\tja\tyes\n8\tnein\tno\n")
    pairs = records([("yes", "ja"), ("no", "nein")])
    assert list(Files((path,), columns={"source": "en", "target": "de"}).split("train")) == pairs
    assert list(Files((path,), columns={"source": "2", "target": "de"}).split("train")) == pairs
    assert Files((path,), columns={"source": 2, "target": 1}).split("train")[0] == {"source": "en", "target": "de"}


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_fields_of_objects(write, suffix):
    flat = write(
        f"flat{suffix}", '{"source": "a\\nb \\ud83d\\ude00", "target": "\u2028é"}\r\n{"target": "d", "source": "c"}'
    )
    assert list(Files((flat,)).split("train")) == records([("a\nb 😀", "\u2028é"), ("c", "d")])
    nested = write(f"nested{suffix}", '{"id": 1, "translation": {"en": "yes", "de": "ja"}}\n')
    data = Files((nested,), columns={"source": "translation.en", "target": "translation.de"})
    assert list(data.split("train")) == records([("yes", "ja")])


def test_paths_may_be_strings_in_a_list_or_alone(write, numbered):
    path = numbered(3)
    assert Files([str(path)]) == Files(str(path)) == Files(path) == Files((path,))
    assert hash(Files([str(path)])) == hash(Files(path))


@pytest.mark.parametrize("total", [0, 1, 2, 3, 19, 20, 21, 39, 40, 59, 60, 100, 1000, 1001, 1999])
@pytest.mark.parametrize("held_out", [0, 1, 3, 7, 1000])
def test_held_out_records_are_in_no_other_split_and_none_is_lost(write, numbered, total, held_out):
    path = numbered(total) if total else write("n.tsv", "a\tb\n")
    data = Files((path,), held_out=held_out, columns={} if total else {"source": "a", "target": "b"})
    train, valid, test = (numbers(data.split(name)) for name in ("train", "valid", "test"))
    assert sorted(train + valid + test) == list(range(total))
    assert len(valid) == len(test) == min(held_out, total // 20)
    assert (train, valid, test) == (sorted(train), sorted(valid), sorted(test))
    for held in filter(None, (valid, test)):  # from all over the file
        assert max(b - a for a, b in zip([0, *held], [*held, total], strict=True)) <= 2 * total // len(held)


@pytest.mark.parametrize("total", [1, 19, 20, 21, 1000, 1999])
def test_with_test_files_only_valid_is_held_out(numbered, total):
    data = Files((numbered(total),), test=(numbered(2, "test.tsv"),), held_out=30)
    train, valid = numbers(data.split("train")), numbers(data.split("valid"))
    assert sorted(train + valid) == list(range(total)) and len(valid) == min(30, total // 20)
    assert numbers(data.split("test")) == [0, 1]


def test_with_valid_files_nothing_is_held_out(numbered):
    data = Files((numbered(100),), valid=(numbered(3, "valid.tsv"),))
    assert numbers(data.split("train")) == list(range(100)) and numbers(data.split("valid")) == [0, 1, 2]
    assert len(data.split("test")) == 0
    both = Files((numbered(100),), valid=(numbered(3, "valid.tsv"),), test=(numbered(4, "test.tsv"),))
    assert [len(both.split(name)) for name in ("train", "valid", "test")] == [100, 3, 4]


def test_a_split_is_a_sequence_that_pickles(write, numbered):
    lines = write("a", "0\n1\n"), write("b", "0\n-1\n")
    objects = write("n.jsonl", '{"source": "0", "target": "0"}\n{"source": "1", "target": "-1"}')
    for data in (Files(lines), Files(objects), Files((numbered(2),))):
        split = data.split("train")
        assert split[-1] == split[1] == split[1:][0] == pickle.loads(pickle.dumps(split))[1]
        assert split[-1] == {"source": "1", "target": "-1"}
        with pytest.raises(IndexError):
            split[2]
    assert len(pickle.dumps(Files((numbered(100_000),)).split("train"))) < 2000


def test_files_of_different_lengths_are_named_with_the_first_line_alone(write):
    data = Files((write("a.en", "1\n2\n3\n"), write("a.de", "1\n2\u2028\n")))
    message = r"a\.en has 3 lines but .*a\.de has 2,.*a\.en, line 3, is the first without a partner"
    with pytest.raises(UserError, match=message):
        data.split("train")
    with pytest.raises(UserError, match=r"a\.de has 2 lines but .*a\.en has 3,.*a\.en, line 3,"):
        Files(data.train[::-1]).split("train")


def test_an_unknown_column_is_named_when_the_file_is_opened(write):
    path = write("pairs.tsv", "id\tde\ten\n7\tja\tyes\n")
    with pytest.raises(UserError, match=r"pairs\.tsv has no column 'fr'; its first line has id, de, en"):
        Files((path,), columns={"source": "en", "target": "fr"}).split("train")
    twice = write("twice.tsv", "en\ten\na\tb\n")
    with pytest.raises(UserError, match=r"twice\.tsv has several columns 'en'"):
        Files((twice,), columns={"text": "en"}).split("train")


def test_a_line_with_too_few_columns_is_named_when_it_is_read(write):
    path = write("pairs.tsv", "de\ten\nja\tyes\nnein\n")
    split = Files((path,), columns={"source": "en", "target": "de"}).split("train")
    assert split[0] == {"source": "yes", "target": "ja"}
    with pytest.raises(UserError, match=r"pairs\.tsv, line 3 has 1 of the 2 columns needed \(source is column 1"):
        split[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": ', "pairs.jsonl, line 2 is not JSON: Expecting value at character 7"),
        ("", "pairs.jsonl, line 2 is not JSON: Expecting value at character 1"),
        ('["a", "b"]', r"pairs.jsonl, line 2 has \['a', 'b'\] where an object with 'a' was expected"),
        ('{"x": 1, "y": 2}', "pairs.jsonl, line 2 has no 'a.b': there is no 'a' among x, y"),
        ("{}", "pairs.jsonl, line 2 has no 'a.b': there is no 'a' among no fields"),
        ('{"a": {"c": "", "d": ""}}', "pairs.jsonl, line 2 has no 'a.b': there is no 'b' among c, d"),
        ('{"a": "text"}', "pairs.jsonl, line 2 has 'text' where an object with 'b' was expected"),
        ('{"a": {"b": "\\ud83d"}}', r"pairs.jsonl, line 2 has '\\ud83d' in 'source', which is not a character"),
    ],
)
def test_an_object_that_cannot_be_is_named_when_it_is_read(write, line, message):
    path = write("pairs.jsonl", '{"a": {"b": "good"}}\n' + line + "\n")
    split = Files((path,), columns={"source": "a.b", "target": "a.b"}).split("train")
    assert split[0] == {"source": "good", "target": "good"}
    with pytest.raises(UserError, match=message):
        split[1]


EMPTY = ["", " ", "\t", "\u3000 \xa0", "\u2028"]


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("side", ["source", "target"])
def test_an_empty_side_of_a_pair_is_named_when_it_is_read(write, empty, side):
    pairs = [("a", "b"), (empty, "d") if side == "source" else ("c", empty), ("e", "f")]
    files = {
        "two": (
            write("two.en", "".join(f"{s}\n" for s, _ in pairs)),
            write("two.de", "".join(f"{t}\n" for _, t in pairs)),
        ),
        "jsonl": (write("n.jsonl", "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs)),),
    }
    if empty != "\t":
        files["tsv"] = (write("n.tsv", "".join(f"{s}\t{t}\n" for s, t in pairs)),)
    for paths in files.values():
        split = Files(paths).split("train")
        assert [split[0], split[2]] == records([pairs[0], pairs[2]])
        name = paths[-1 if side == "target" else 0].name
        message = f"{name}, line 2 has an empty {side}; remove the record, or set allow_empty=True to keep such records"
        with pytest.raises(UserError, match=message):
            split[1]
        assert list(Files(paths, allow_empty=True).split("train")) == records(pairs)


def test_an_empty_line_of_a_table_is_named_with_the_line_of_the_file(write):
    """Below a header, and when others are held out before it."""
    lines = [f"{n}\t{n}" for n in range(100)]
    lines[51] = "51\t"
    path = write("n.tsv", "\n".join(["source\ttarget", *lines]))
    split = Files((path,), columns={"source": "source", "target": "target"}).split("train")
    with pytest.raises(UserError, match=r"n\.tsv, line 53 has an empty target"):
        list(split)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": ("a.txt",)}, "train is a.txt; give two"),
        ({"train": ("a", "b", "c")}, "train is a, b, c; give two"),
        ({"train": ("a.tsv", "b.tsv")}, "train is a.tsv, b.tsv; give two"),
        ({"train": ("a.tsv",), "valid": ("b.txt",)}, "valid is b.txt; give two"),
        ({"train": ("a", "b"), "held_out": -1}, "held_out=-1"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        Files(**fields)


def test_a_missing_or_empty_file_and_an_unknown_split_are_named(write):
    with pytest.raises(UserError, match=r"none\.tsv does not exist"):
        Files(("none.tsv",)).split("train")
    with pytest.raises(UserError, match=r"empty\.tsv is empty"):
        Files((write("empty.tsv", ""),)).split("valid")
    with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
        Files(("a.tsv",)).split("dev")


def test_one_file_may_be_source_and_target(write):
    path = write("a.txt", "same\n")
    assert list(Files((path, path)).split("train")) == records([("same", "same")])


def test_a_prompt_is_the_text_itself():
    assert Files(("a.tsv",)).tags() == () and Files(("a.tsv",)).prompt("<de> text") == "<de> text"


def test_no_files_are_named_when_they_are_needed():
    with pytest.raises(UserError, match=r"there are no valid files; set data.valid to two text files"):
        Files().split("valid")


@pytest.mark.parametrize("period", [2, 3, 4, 5, 10, 20])
def test_held_out_records_follow_no_pattern_of_the_file(write, period):
    path = write("a.tsv", "".join(f"words\t{n % period}\n" for n in range(2000)))
    data = Files((path,), columns={"text": "", "label": ""}, held_out=100)
    for split in ("valid", "test"):
        labels = [record["label"] for record in data.split(split)]
        assert len(labels) == 100 and max(labels.count(label) for label in labels) < 2 * 100 / period + 8


def test_fields_are_found_by_their_names_or_else_by_their_order(write):
    rows = "a\tyes\nb\tno\n"
    for name, text in (("x.tsv", rows), ("y.tsv", "label\tid\ttext\nyes\t1\ta\nno\t2\tb\n")):
        path = write(name, text)
        found = Files((path,), columns={"text": "", "label": ""}, held_out=0).split("train")
        assert list(found) == [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}]


def test_test_files_alone_can_be_evaluated_on(write):
    data = Files(test=(write("a.tsv", "a\tb\n"),))
    assert list(data.split("test")) == [{"source": "a", "target": "b"}]
    with pytest.raises(UserError, match=r"there are no train files; set data.train"):
        data.split("train")


def test_a_first_line_that_names_only_some_of_the_fields_is_no_record(write):
    path = write("a.csv", "text,sentiment\ngood,pos\n")
    with pytest.raises(UserError, match=r"names text, sentiment, but not label; set data.columns.label to one"):
        Files((path,), columns={"text": "", "label": ""}).split("train")
    found = Files((path,), columns={"text": "", "label": "sentiment"}).split("train")
    assert list(found) == [{"text": "good", "label": "pos"}]
