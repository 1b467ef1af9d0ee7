import ast
import inspect
import pickle
import string

import pytest

from transformer_jax.data import documentation, text
from transformer_jax.data.documentation import python_documentation
from transformer_jax.data.lines import Lines
from transformer_jax.data.text import Text
from transformer_jax.errors import UserError

BOOK = "Der Fuchs\u2028 springt.\n\n\nزبان شیرین\nहिन्दी\x85\n\n一句中文 😀𝔘\x0c\rend\n"
PARAGRAPHS = ["Der Fuchs\u2028 springt.", "زبان شیرین\nहिन्दी\x85", "一句中文 😀𝔘\x0c\rend"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    def write(name: str, data: str | bytes):
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return tmp_path / name

    return write


def texts(data: Text, name: str) -> list[str]:
    return [document["text"] for document in data.split(name)]


def test_what_a_document_is(write):
    path = write("book", BOOK)
    assert texts(Text(path, valid_fraction=0), "train") == [BOOK]
    assert texts(Text(path, valid_fraction=0, document="paragraph"), "train") == PARAGRAPHS
    assert texts(Text(path, valid_fraction=0, document="line"), "train") == BOOK.removesuffix("\n").split("\n")


@pytest.mark.parametrize("document", ["file", "paragraph", "line"])
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(write, document):
    plain, windows = write("plain", BOOK), write("windows", "\ufeff" + BOOK.replace("\n", "\r\n"))
    whole = Text(plain, valid_fraction=0, document=document)
    assert texts(whole, "train") == texts(Text(windows, valid_fraction=0, document=document), "train")


@pytest.mark.parametrize("piece", range(4, 30))
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_the_pieces_of_a_file_are_the_file(write, monkeypatch, piece, ends):
    monkeypatch.setattr(text, "PIECE", piece)
    data = Text(write("book", BOOK.replace("\n", ends)))
    train, valid = texts(data, "train"), texts(data, "valid")
    assert "".join(train + valid) == BOOK
    assert len(train) > 2 and max(len(part.encode()) for part in train) <= piece + 3


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_last_part_of_a_file_is_valid(write, fraction):
    data = Text(write("digits", string.digits * 10), valid_fraction=fraction)
    train, valid = "".join(texts(data, "train")), "".join(texts(data, "valid"))
    assert train + valid == string.digits * 10 and len(train) == round(100 * (1 - fraction))
    assert texts(data, "test") == []


def test_several_files_are_parted_as_one_text(write):
    paths = [write(name, name * 10) for name in "abcd"]
    data = Text(paths, valid_fraction=0.4)
    assert texts(data, "train") == ["a" * 10, "b" * 10, "c" * 4]
    assert texts(data, "valid") == ["c" * 6, "d" * 10]


@pytest.mark.parametrize("document", ["line", "paragraph"])
@pytest.mark.parametrize(("total", "held_out"), [(1, 0), (2, 1), (3, 1), (10, 1), (20, 2), (25, 3)])
def test_the_last_documents_are_valid(write, document, total, held_out):
    separator = {"line": "\n", "paragraph": "\n\n"}[document]
    numbers = [str(number) for number in range(total)]
    half = total // 2
    paths = [write(name, separator.join(part)) for name, part in (("a", numbers[:half]), ("b", numbers[half:])) if part]
    data = Text(paths, document=document)
    assert texts(data, "train") == numbers[: total - held_out]
    assert texts(data, "valid") == numbers[total - held_out :]


def test_files_of_their_own_make_valid_and_test(write):
    data = Text(write("a", "aaaa"), valid=write("b", "bb"), test=write("c", "c"))
    assert [texts(data, name) for name in ("train", "valid", "test")] == [["aaaa"], ["bb"], ["c"]]
    only_test = Text(write("a", "aaaa"), test=write("c", "c"), valid_fraction=0.25)
    assert [texts(only_test, name) for name in ("train", "valid", "test")] == [["aaa"], ["a"], ["c"]]


@pytest.mark.parametrize("document", ["file", "paragraph", "line"])
def test_a_split_is_a_sequence_that_pickles(write, document):
    split = Text([write("a", BOOK), write("b", BOOK)], document=document, valid_fraction=0).split("train")
    assert split[-1] == split[len(split) - 1] == split[1:][-1] == pickle.loads(pickle.dumps(split))[-1]
    with pytest.raises(IndexError):
        split[len(split)]


@pytest.mark.parametrize("data", [b"good\nbad \xff\n", b"good\n\xbf", b"good\nbad \xf0\x9f\x98"])
@pytest.mark.parametrize("piece", [4, 5, 100])
def test_bytes_that_are_not_utf8_are_named(write, monkeypatch, data, piece):
    monkeypatch.setattr(text, "PIECE", piece)
    with pytest.raises(UserError, match=r"bad, line 2: byte \d of the line, 0x.., is not UTF-8"):
        texts(Text(write("bad", data), valid_fraction=0), "train")
    with pytest.raises(UserError, match=r"bad, line 2: byte \d of the line, 0x.., is not UTF-8"):
        texts(Text(write("bad", data), document="line", valid_fraction=0), "train")


def test_a_file_that_begins_within_a_character_is_not_utf8(write):
    with pytest.raises(UserError, match="line 1: byte 1 of the line, 0xa1"):
        texts(Text(write("spanish", "¡Hola!\n".encode("latin-1"))), "train")


def test_a_missing_or_empty_file_is_named(write):
    with pytest.raises(UserError, match="none does not exist"):
        Text("none").split("train")
    with pytest.raises(UserError, match="empty is empty"):
        Text([write("full", "a"), write("empty", "")], document="line").split("valid")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"document": "page"}, "document='page' is not one of file, paragraph, line"),
        ({"valid_fraction": 1.0}, "valid_fraction=1.0"),
        ({"valid_fraction": -0.1}, "valid_fraction=-0.1"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        Text(**fields)


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
        Text().split("dev")


def test_the_documentation_of_python_is_what_its_modules_say_of_themselves():
    documents = dict(python_documentation())
    assert len(documents) > 200 and 1_000_000 < sum(map(len, documents.values())) < 5_000_000
    for module in (ast, inspect, string):
        assert documents[module.__name__].startswith(inspect.getdoc(module))
    assert inspect.getdoc(string.capwords) in documents["string"]
    assert {"json", "email.header"} <= set(documents)
    assert not any({"test", "tests", "numpy", "__init__"} & set(name.split(".")) for name in documents)


def test_documentation_is_read_in_order_from_source_that_is_not_run(monkeypatch, tmp_path):
    module = '''"""Module."""
raise SystemExit
class Outer:
    """Class,
    indented."""
    async def method(self):
        """Method."""
try:
    def inner():
        """Function."""
        def innermost():
            "Within."
finally:
    "no docstring"
'''
    expected = "Module.\n\nClass,\nindented.\n\nMethod.\n\nFunction.\n\nWithin."
    for name in ("b.py", "a/__init__.py", "a/c.py", "a/tests/d.py", "site-packages/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(module)
    (tmp_path / "bad.py").write_text("def")
    (tmp_path / "none.py").write_text("x = 1")
    (tmp_path / "old.py").write_bytes(b'# -*- coding: latin-1 -*-\n"\xfcber"')
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = python_documentation.__wrapped__()
    assert found == (("a", expected), ("a.c", expected), ("b", expected), ("old", "über"))


def test_a_module_is_held_out_by_its_name():
    train, valid = texts(Text(), "train"), texts(Text(), "valid")
    documents = dict(python_documentation())
    assert sorted(train + valid) == sorted(documents.values()) and texts(Text(), "test") == []
    assert 0.05 < len(valid) / len(documents) < 0.15
    names = ("ast", "bdb", "json", "os", "tempfile", "traceback", "typing")
    held_out = [name for name in names if documents[name] in valid]
    assert held_out == ["bdb", "tempfile", "traceback"]  # in every process and Python version
    assert texts(Text(valid_fraction=0), "valid") == []


def test_python_without_its_source_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="no Python source in"):
        python_documentation.__wrapped__()


def test_line_documents_are_not_read_before_they_are_asked_for(write, monkeypatch):
    split = Text(write("lines", "a\nb\nc\n"), document="line", valid_fraction=0).split("train")
    read = []
    monkeypatch.setattr(Lines, "item", lambda self, index: read.append(index))
    assert len(split) == 3 and not read
    split[2]
    assert read == [2]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_files_to_evaluate_on_do_without_others(tmp_path, split):
    (tmp_path / "a.txt").write_text("abc")
    data = Text(**{split: (tmp_path / "a.txt",)})
    assert [record["text"] for record in data.split(split)] == ["abc"]
    assert not len(data.split("train"))  # and none of Python's documentation beside them
