import os
import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from transformer_jax.data import lines
from transformer_jax.data.lines import Lines
from transformer_jax.errors import UserError

SENTENCES = [
    "زبان پارسی شیرین است",
    "हिन्दी में एक वाक्य",
    "一句中文",
    "astral: 😀𝔘🏳️‍🌈",
    "a line separator\u2028a paragraph separator\u2029a next line\x85 in it",
    "a form feed\x0c a vertical tab\x0b separators\x1c\x1d\x1e a lone\rreturn",
    "",
    " spaces\tand tabs ",
    "a null\x00 too",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "transformer_jax" / "lines"


def written(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path):
    path = written(tmp_path / "text", "".join(f"{sentence}\n" for sentence in SENTENCES))
    assert list(Lines(path)) == SENTENCES
    assert [Lines(path)[index] for index in reversed(range(len(SENTENCES)))] == SENTENCES[::-1]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\ntwo", ["one", "two"]),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo\n\n", ["one", "two", ""]),
        (b"\n", [""]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\ntwo\r", ["one", "two"]),
        (b"one\r\r\n\r\n", ["one\r", ""]),
        (b"\xef\xbb\xbfone\ntwo", ["one", "two"]),
        (b"one\n\xef\xbb\xbftwo", ["one", "\ufefftwo"]),
        (b"\xef\xbb\xbf\n", [""]),
    ],
)
def test_the_ends_of_lines_and_files(tmp_path, data, expected):
    assert list(Lines(written(tmp_path / "text", data))) == expected


def test_lines_are_the_same_wherever_the_scan_stops_to_read_on(tmp_path, monkeypatch):
    data = "".join(f"{sentence}\r\n" for sentence in SENTENCES)
    for chunk in range(1, 40):
        monkeypatch.setattr(lines, "CHUNK", chunk)
        assert list(Lines(written(tmp_path / f"{chunk}", data))) == SENTENCES


def test_lines_are_a_sequence(tmp_path):
    text = Lines(written(tmp_path / "text", "a\nb\nc\n"))
    assert len(text) == 3
    assert text[-1] == "c" and text[1:] == ["b", "c"] and text[::-2] == ["c", "a"]
    with pytest.raises(IndexError):
        text[3]


def test_filled_lines_have_a_character(tmp_path):
    text = Lines(written(tmp_path / "text", b"\xef\xbb\xbf\na\n\n\r\nb\r\n\r\r\n\n"))
    assert text.filled().tolist() == [bool(line) for line in text] == [False, True, False, False, True, True, False]


def test_bytes_that_are_not_utf8_are_named_when_their_line_is_read(tmp_path):
    path = written(tmp_path / "text", b"first\nzwei\n" + "für\n".encode("latin-1") + b"last\n")
    text = Lines(path)
    assert (text[0], text[1], text[3]) == ("first", "zwei", "last")
    with pytest.raises(UserError, match=r"text, line 3: byte 2 of the line, 0xfc, is not UTF-8"):
        text[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "text does not exist"),
        (lambda path: path.mkdir(), "text is a folder"),
        (lambda path: os.mkfifo(path), "text is a pipe"),
        (lambda path: path.touch(), "text is empty"),
        (lambda path: path.write_bytes(b"\xef\xbb\xbf"), "text is empty"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, make, message):
    make(tmp_path / "text")
    with pytest.raises(UserError, match=message):
        Lines(tmp_path / "text")


def test_a_file_is_scanned_once(tmp_path, monkeypatch):
    path = written(tmp_path / "text", "a\nb\n")
    Lines(path)
    monkeypatch.setattr(lines, "scan_lines", lambda file, index: pytest.fail("scanned again"))
    monkeypatch.chdir(tmp_path)
    assert list(Lines("text")) == ["a", "b"]


def test_a_file_that_changed_is_scanned_again(tmp_path):
    path = written(tmp_path / "text", "a\nb\n")
    assert list(Lines(path)) == ["a", "b"]
    assert list(Lines(written(path, "a\nbc\nd\n"))) == ["a", "bc", "d"]
    time = path.stat().st_mtime_ns + 1
    os.utime(written(path, "ab\nc\nd"), ns=(time, time))
    assert list(Lines(path)) == ["ab", "c", "d"]
    os.utime(written(path, "abcdef\n"), ns=(time, time))  # at the same time, of another size
    assert list(Lines(path)) == ["abcdef"]
    os.utime(written(path, "ab\ndef\n"), ns=(time + 1, time + 1))  # of the same size, at another time
    assert list(Lines(path)) == ["ab", "def"]


def replaced_in_place(path, other):
    path.write_bytes(other.read_bytes())


def replaced_by_a_rename(path, other):
    other.replace(path)


def replaced_through_a_link(path, other):
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("replaced", [replaced_in_place, replaced_by_a_rename, replaced_through_a_link])
def test_another_file_of_the_same_size_and_time_is_scanned_again(tmp_path, replaced):
    """As `cp -p` and `mv` put it there."""
    path, other = written(tmp_path / "text", "ab\ncdef\n"), written(tmp_path / "other", "abcd\nef\n")
    status = path.stat()
    assert list(Lines(path)) == ["ab", "cdef"]
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    replaced(path, other)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert list(Lines(path)) == ["abcd", "ef"]


def test_content_tells_files_apart_where_nothing_else_does(tmp_path, monkeypatch):
    """On a file system that knows neither inodes nor changes of status."""
    path = written(tmp_path / "text", "ab\ncdef\n" * 100_000)
    status = os.stat_result((0, 0, 0, 0, 0, 0, path.stat().st_size, 0, 0, 0))
    monkeypatch.setattr(lines.os, "fstat", lambda descriptor: status)
    assert Lines(path)[-1] == "cdef"
    assert Lines(written(path, "abcd\nef\n" * 100_000))[-1] == "ef"


@pytest.mark.parametrize("data", [b"a\nbcdefg\nh", b"abcdefghi\n", b"ab\nc\ndefg\n", b"abc\ndef\nhi"])
def test_a_file_that_is_changed_while_it_is_read_is_named(tmp_path, data):
    path = written(tmp_path / "text", b"ab\ncd\nefg\n")
    text = Lines(path)
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(
        UserError, match=r"text was changed while it was being read; start again with a file that stays"
    ):
        list(text)


def test_a_file_that_is_cut_short_while_it_is_read_is_named(tmp_path):
    text = Lines(written(tmp_path / "text", b"a line\n" * 10_000))
    os.truncate(tmp_path / "text", 100)
    with pytest.raises(UserError, match="was changed while it was being read"):
        text[-1]


def test_one_index_is_kept_for_a_path(tmp_path, cache):
    for number in range(5):
        assert len(Lines(written(tmp_path / "text", "a\n" * (number + 1)))) == number + 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("left", [0, 8, 12, 16, 24, 32, 36])
def test_an_index_cut_short_is_made_again(tmp_path, cache, left):
    path = written(tmp_path / "text", "a\nb\nc\n")
    Lines(path)
    (index,) = cache.iterdir()
    index.write_bytes(index.read_bytes()[:left])
    assert list(Lines(path)) == ["a", "b", "c"]
    assert list(Lines(path)) == ["a", "b", "c"]


def test_an_index_is_there_whole_or_not_at_all(tmp_path, cache, monkeypatch):
    path = written(tmp_path / "text", "a\nb\n")
    scan = lines.scan_lines

    def stopped(file, index):
        scan(file, index)
        raise KeyboardInterrupt

    monkeypatch.setattr(lines, "scan_lines", stopped)
    with pytest.raises(KeyboardInterrupt):
        Lines(path)
    assert list(cache.iterdir()) == []


def test_no_cache_is_needed(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert list(Lines(written(tmp_path / "text", "a\nb"))) == ["a", "b"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("/dev/null"))
    assert list(Lines(written(tmp_path / "other", "c\nd"))) == ["c", "d"]


def test_a_cache_that_fails_halfway_is_done_without(tmp_path, cache, monkeypatch):
    scan, calls = lines.scan_lines, []

    def full(file, index):
        scan(file, index)
        calls.append(index)
        if len(calls) == 1:
            raise OSError("no space left on device")

    monkeypatch.setattr(lines, "scan_lines", full)
    assert list(Lines(written(tmp_path / "text", "a\nb"))) == ["a", "b"]
    assert len(calls) == 2 and list(cache.iterdir()) == []


def test_lines_go_to_other_processes_as_a_path(tmp_path):
    text = Lines(written(tmp_path / "text", "x" * 10_000 + "\nend"))
    sent = pickle.dumps(text)
    assert len(sent) < 1000 and list(pickle.loads(sent)) == list(text)


def test_threads_read_at_once(tmp_path):
    expected = [f"{number} 😀" * (number % 7) for number in range(2_000)]
    text = Lines(written(tmp_path / "text", "\n".join(expected)))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: list(text), range(8))) == [expected] * 8


def test_a_large_file_takes_no_memory(tmp_path):
    path = written(tmp_path / "text", b"twenty bytes a line\n" * 3_000_000)
    tracemalloc.start()
    text = Lines(path)
    assert len(text) == 3_000_000 and text[1_234_567] == text[-1] == "twenty bytes a line"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20  # the file has 57 MiB, and where its lines end is 23 more
