import csv
import io
import os
import pickle
import tracemalloc
from random import Random

import pytest

from transformer_jax.data import Files, csv_records, lines
from transformer_jax.data.csv_records import CsvRecords
from transformer_jax.errors import UserError

CELLS = [
    "plain",
    "",
    "a,b",
    'a "quote"',
    '"',
    "two\nlines",
    "two\r\nlines",
    "\n",
    "中文,\n",
    "😀",
    "é\u2028x",
    '""',
    ",",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    def write(data, name="table.csv"):
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return tmp_path / name

    return write


def random_table(seed, rows=40):
    rng = Random(seed)
    return [[rng.choice(CELLS) for _ in range(rng.randint(2, 4))] for _ in range(rows)]


def written_by_python(table, **options):
    file = io.StringIO(newline="")
    csv.writer(file, **options).writerows(table)
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}])
@pytest.mark.parametrize("seed", range(5))
def test_what_python_writes_is_read(write, seed, options):
    table = random_table(seed)
    records = CsvRecords(write(written_by_python(table, **options)))
    assert [records.cells(index) for index in range(len(records))] == table
    again = pickle.loads(pickle.dumps(records))
    assert again.cells(7) == table[7] and isinstance(again, CsvRecords)


def test_records_are_the_same_wherever_the_scan_stops_to_read_on(write, monkeypatch):
    table = random_table(3, rows=10)
    for chunk in range(1, 30):
        monkeypatch.setattr(lines, "CHUNK", chunk)
        records = CsvRecords(write(written_by_python(table), f"{chunk}.csv"))
        assert [records.cells(index) for index in range(len(records))] == table


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a,b\nc,d", [["a", "b"], ["c", "d"]]),
        (b"\xef\xbb\xbfa,b\r\nc,d\r\n", [["a", "b"], ["c", "d"]]),
        (b'\xef\xbb\xbf"a\nx",b\n', [["a\nx", "b"]]),
        (b'a,"b\n"', [["a", "b\n"]]),
        (b",\n", [["", ""]]),
        (b'a "b" c,d\n', [['a "b" c', "d"]]),
        (b"\n", [[""]]),
    ],
)
def test_the_ends_of_records_and_files(write, data, expected):
    records = CsvRecords(write(data))
    assert [records.cells(index) for index in range(len(records))] == expected


def test_records_of_files_by_number_and_by_name(write):
    path = write('id,"the review",stars\n7,"good,\n""very"" good",5\n8,bad,1\n')
    expected = [{"text": 'good,\n"very" good', "label": "5"}, {"text": "bad", "label": "1"}]
    named = Files(path, columns={"text": "the review", "label": "stars"})
    assert list(named.split("train")) == expected and named.fields() == ("text", "label")
    assert list(Files(path, columns={"text": "1", "label": "stars"}).split("train")) == expected
    assert Files(path, columns={"text": "1", "label": "2"}).split("train")[0] == {
        "text": "the review",
        "label": "stars",
    }
    assert Files(path).split("train")[2] == {"source": "8", "target": "bad"}


@pytest.mark.parametrize(
    ("data", "index", "message"),
    [
        (b'a,b\n"1\n2\n3",x\nc,5" pipe\nd,e\n', 2, r"table.csv, line 5 has a quote out of place in column 1, counted"),
        (b'a,b\n"c"x,d\n', 1, r'table.csv, line 2 has a quote out of place in column 0, .* as in "a ""b"" c"'),
        (b'a,b\nc,"d\ne,f\n', 1, r"table.csv, line 2 has a quote out of place in column 1"),
        (b'"a\nb",c\nd\n', 1, r"table.csv, line 3 has 1 of the 2 columns .*; put a comma between columns"),
        (b'"a\nb",c\n"\n\nx",\n', 1, r"table.csv, line 3 has an empty target; remove the record"),
        (b'a,b\n"\n\n' + "für".encode("latin-1") + b'",b\n', 1, r"table.csv, line 4: byte 2 of the line, 0xfc, is not"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_with_its_line(write, data, index, message):
    records = Files(write(data)).split("train")
    with pytest.raises(UserError, match=message):
        records[index]


def test_a_table_is_scanned_once_and_again_as_lines(write, monkeypatch):
    path = write('"a\nb",c\nd,e\n')
    assert len(CsvRecords(path)) == 2 and len(lines.Lines(path)) == 3
    monkeypatch.setattr(csv_records, "scan_csv", lambda file, index: pytest.fail("scanned again"))
    assert len(CsvRecords(path)) == 2


def test_a_table_that_is_cut_short_while_it_is_read_is_named(write):
    records = CsvRecords(write(b'"a\n",line\n' * 10_000))
    os.truncate(records.path, 100)
    with pytest.raises(UserError, match="was changed while it was being read"):
        records[-1]


def test_a_large_table_takes_no_memory(write):
    path = write(b'"twenty bytes,\n",1\n' * 2_000_000)
    tracemalloc.start()
    records = CsvRecords(path)
    assert len(records) == 2_000_000 and records.cells(1_234_567) == ["twenty bytes,\n", "1"]
    assert records.where(1_999_999) == f"{path}, line 3999999"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20  # where its records end is 15 MiB on disk
