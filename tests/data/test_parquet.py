import pickle
import sys

import pytest

from transformer_jax.data import Files
from transformer_jax.data.parquet import Parquet
from transformer_jax.data.source import Checked
from transformer_jax.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "source": f"é{n}",
        "target": f"中{n}",
        "stars": n % 5,
        "tags": ["a", "b"][: n % 3],
        "pair": {"en": f"e{n}", "x": 1},
    }
    for n in range(50)
]


@pytest.fixture
def path(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=7)
    return tmp_path / "rows.parquet"


def test_records_have_the_columns_asked_for(path):
    train = Files(path, held_out=0).split("train")
    assert list(train) == [{"source": row["source"], "target": row["target"]} for row in ROWS]
    data = Files(path, columns={"text": "pair.en", "label": "stars", "words": "tags"}, held_out=0)
    expected = [{"text": row["pair"]["en"], "label": row["stars"], "words": row["tags"]} for row in ROWS]
    split = data.split("train")
    assert list(split) == expected and [split[index] for index in (49, -50, 7, 6)] == [
        expected[i] for i in (49, 0, 7, 6)
    ]
    assert pickle.loads(pickle.dumps(split))[13] == expected[13] and len(pickle.dumps(split)) < 1000


def test_a_row_group_is_read_once_and_no_more_than_is_needed(path, monkeypatch):
    records, read = Parquet(path, {"text": "pair.en"}, False), []
    whole = type(records._file).read_row_group

    def counted(self, number, columns):
        read.append((number, columns))
        return whole(self, number, columns=columns)

    monkeypatch.setattr(type(records._file), "read_row_group", counted)
    assert len(records) == 50 and not read
    for index in range(20):
        records[index]
    assert read == [(0, ["pair"]), (1, ["pair"]), (2, ["pair"])]


def test_a_name_with_a_dot_is_a_name(tmp_path):
    pq.write_table(pa.table({"a.b": ["x"], "c": ["y"]}), tmp_path / "dots.parquet")
    data = Files(tmp_path / "dots.parquet", columns={"text": "a.b", "label": "c"})
    assert list(data.split("train")) == [{"text": "x", "label": "y"}]


def test_what_cannot_be_read_is_named(path, tmp_path):
    with pytest.raises(UserError, match=r"rows.parquet has no column 'fr' for text; its columns are source, target"):
        Files(path, columns={"text": "fr"}).split("train")
    with pytest.raises(UserError, match=r"rows.parquet, record 3, counted from 0 has no 'pair.de': there is no 'de'"):
        Files(path, columns={"text": "pair.de"}, held_out=0).split("train")[3]
    with pytest.raises(UserError, match=r"none.parquet does not exist"):
        Files(tmp_path / "none.parquet").split("train")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(UserError, match=r"text.parquet cannot be read as Parquet"):
        Files(tmp_path / "text.parquet").split("train")
    pq.write_table(pa.table({"source": ["a", "b"], "target": ["c", " "]}), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"empty.parquet, record 1, counted from 0 has an empty target"):
        Files(tmp_path / "empty.parquet").split("train")[1]
    pq.write_table(pa.table({"source": ["a", None], "target": ["c", "d"]}), tmp_path / "null.parquet")
    records = Checked(Files(tmp_path / "null.parquet").split("train"), ("source",), ("source",), "Files, train")
    with pytest.raises(
        UserError, match=r"Files, train, record 1 \(.*null.parquet, record 1, .*\) has None as 'source'"
    ):
        records[1]


def test_without_pyarrow_the_extra_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        UserError, match=r'rows.parquet needs pyarrow to be read: pip install "transformer_jax\[datasets'
    ):
        Files(path).split("train")
