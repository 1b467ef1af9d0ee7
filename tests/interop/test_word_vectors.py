import gzip
import struct
import tracemalloc

import numpy as np
import pytest
import tokenizers

from transformer_jax.data.tokenizer_training import learn
from transformer_jax.errors import UserError
from transformer_jax.interop import word_vectors
from transformer_jax.interop.word_vectors import load_word_vectors, spellings

VECTORS = {
    "the": [0.1, -2.0, 3.5],
    "New York": [1e-3, 5.0, -6.25],
    "naïve": [7.0, 8.0, 9.0],
    "a\u2028b\x85c\xa0": [10.0, 11.0, 12.0],
    "3": [13.0, 14.0, 15.0],
}
PLAIN = {word: vector for word, vector in VECTORS.items() if " " not in word}


def text(vectors, *, header=True, end="\n", space=" "):
    lines = [f"{word} {space.join(map(str, vector))}" for word, vector in vectors.items()]
    return "".join(f"{line}{end}" for line in [*([f"{len(vectors)} 3"] if header else []), *lines]).encode()


def binary(vectors, *, newline=b"\n", size=3):
    entries = [f"{word} ".encode() + struct.pack(f"<{size}f", *vector) for word, vector in vectors.items()]
    return f"{len(vectors)} {size}\n".encode() + b"".join(entry + newline for entry in entries)


FORMATS = {
    "word2vec": text(VECTORS),
    "the C tool": text(VECTORS, end=" \n"),
    "Windows": b"\xef\xbb\xbf" + text(VECTORS, end="\r\n"),
    "GloVe": text(VECTORS, header=False),
    "GloVe of Windows": b"\xef\xbb\xbf" + text(VECTORS, header=False, end="\r\n"),
    "no last newline": text(VECTORS)[:-1],
    "blank last line": text(VECTORS) + b"\n",
    "binary": binary(PLAIN),
    "gensim binary": binary(PLAIN, newline=b""),
    "no last newline, binary": binary(PLAIN)[:-1],
}


def loaded(tmp_path, content, words):
    (tmp_path / "vectors").write_bytes(content)
    return load_word_vectors(tmp_path / "vectors", words)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_each_word_has_its_row_in_the_order_asked(tmp_path, name, compressed):
    vectors = PLAIN if "binary" in name else VECTORS
    words = ["nowhere", *reversed(vectors), "York", "The", "the"]
    content = gzip.compress(FORMATS[name]) if compressed else FORMATS[name]
    result = loaded(tmp_path, content, words)
    expected = np.array([vectors.get(word, [0, 0, 0]) for word in words], np.float32)
    np.testing.assert_array_equal(result.table, expected)
    assert result.table.dtype == np.float32
    assert result.found.tolist() == [word in vectors for word in words]
    assert result.missing == 3


def test_the_first_of_two_vectors_counts(tmp_path):
    for content in (b"a 1 2\nb 3 4\na 5 6\n", b"3 2\na 1 2\nb 3 4\na 5 6\n"):
        assert loaded(tmp_path, content, ["a", "b"]).table.tolist() == [[1, 2], [3, 4]]
    content = b"3 2\n" + binary({"a": [1, 2], "b": [3, 4], "c": [5, 6]}, size=2)[4:].replace(b"c ", b"a ")
    assert loaded(tmp_path, content, ["a", "b"]).table.tolist() == [[1, 2], [3, 4]]


def test_bytes_that_are_not_utf8_are_a_word_that_nobody_asks_for(tmp_path):
    latin = "für".encode("latin-1")
    for content in (
        b"a 1 2\n" + latin + b" 3 4\nb 5 6\n",
        binary({"a": [1, 2], "XXX": [3, 4], "b": [5, 6]}, size=2).replace(b"XXX", latin),
    ):
        result = loaded(tmp_path, content, ["a", "für", "fr", "b"])
        assert result.found.tolist() == [True, False, False, True]
        assert result.table[[0, 3]].tolist() == [[1, 2], [5, 6]]


def test_the_empty_word_is_never_found(tmp_path):
    for content in (b"2 2\n 1 2\na 3 4\n", binary({"": [1, 2], "a": [3, 4]}, size=2)):
        assert loaded(tmp_path, content, ["", "a", ""]).table.tolist() == [[0, 0], [3, 4], [0, 0]]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 300])
@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_text_and_binary_are_told_apart_at_every_size(tmp_path, size, newline):
    table = np.random.default_rng(size).normal(size=(50, size)).astype(np.float32)
    vectors = {f"{number}": row for number, row in enumerate(table.tolist())}
    for content in (text(vectors, header=False), b"50 %d\n" % size + text(vectors, header=False)):
        np.testing.assert_array_equal(loaded(tmp_path, content, list(vectors)).table, table)
    result = loaded(tmp_path, binary(vectors, newline=newline, size=size), list(vectors))
    np.testing.assert_array_equal(result.table, table)


def test_binary_vectors_are_any_bytes(tmp_path):
    vectors = {"a": b"1 \n ", "b": b" \n \n", "c": b"\n  \n", "d": b"3 4\n"}
    content = b"4 6\n" + b"".join(f"{word} ".encode() + vector * 6 for word, vector in vectors.items())
    result = loaded(tmp_path, content, list(vectors))
    assert result.table.astype("<f4").tobytes() == b"".join(vector * 6 for vector in vectors.values())


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_binary_vectors_are_the_same_wherever_a_block_ends(tmp_path, monkeypatch, newline):
    content = binary(PLAIN, newline=newline)
    monkeypatch.setattr(word_vectors, "LONGEST_WORD", 12)
    for block in range(1, len(content)):
        monkeypatch.setattr(word_vectors, "BLOCK", block)
        assert loaded(tmp_path, content, list(PLAIN)).table.tolist() == np.float32(list(PLAIN.values())).tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1 2\nb 3 4\nc 5\n", r"vectors, line 3: 1 values after the word, not 2; fix the line"),
        (b"2 3\na 1 2 3\nb 1 2\n", r"vectors, line 3: 2 values after the word, not 3"),
        (b"2 3\na 1 2\nb 1 2 3\n", r"vectors, line 2: 2 values after the word, not 3"),
        (b"1 4\na 1 2 3 4\n\n\nb\n", r"vectors, line 5: 0 values after the word, not 4"),
        (b"2 2\na 1 2\nb 1 x2\n", r"vectors, line 3: could not convert string to float: b'x2'; fix the line"),
        (b"2 2\na 1 x2\nb 1 2\n", r"vectors, line 2: could not convert"),
        (b"3 2\na 1 2\nb 1 2\n", r"vectors has 2 vectors but its first line says 3"),
        (b"1 2\na 1 2\nb 1 2\n", r"vectors has 2 vectors but its first line says 1"),
        (b"", r"begins neither with COUNT SIZE nor with a word and its vector; give a file of word2vec"),
        (b"\n\n", r"begins neither"),
        (b"3 0\na\nb\nc\n", r"line 2: 0 values after the word, not 1"),
        (b"words of a text\n", r"begins neither"),
        (b"PK\x03\x04\x14\x00\x00\x00\x00\x00glove.txt", r"begins neither"),
    ],
)
def test_what_is_wrong_in_a_text_file_is_said(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        loaded(tmp_path, content, ["a", "b"])


def test_a_binary_file_of_another_length_is_an_error(tmp_path):
    content = binary(PLAIN, newline=b"")
    for left in range(len(b"4 3\nthe ") + 5, len(content)):
        with pytest.raises(
            UserError, match=r"vectors is cut short or damaged: it has [0123] complete vectors of 4; get"
        ):
            loaded(tmp_path, content[:left], ["the"])
    with pytest.raises(UserError, match=r"vectors continues after the 4 vectors that its first line says"):
        loaded(tmp_path, content + b"x", ["the"])


def test_a_file_without_words_is_not_read_to_the_end_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(word_vectors, "BLOCK", 1 << 16)
    path = tmp_path / "vectors"
    path.write_bytes(binary({"a": [1, 2, 3]}).replace(b"1 3", b"9 3"))
    with path.open("r+b") as file:
        file.truncate(2**33)  # zeros, as where a download was never filled in
    with pytest.raises(UserError, match="it has 1 complete vectors of 9"):
        load_word_vectors(path, ["a"])


HUGE = b"9" * 5000


@pytest.mark.parametrize("count", [b"2", b"9" * 12, b"9" * 30, HUGE])
@pytest.mark.parametrize("size", [b"5", b"1500", b"9" * 5, b"9" * 9, b"9" * 15, b"9" * 30, HUGE])
def test_nothing_is_allocated_for_what_a_header_says(tmp_path, count, size):
    for rest in (b"", b"a 1 2\n", b"a " + bytes(8), b"a " + b"1 " * 999):
        plain = count + b" " + size + b"\n" + rest
        for content in (plain, gzip.compress(plain)):
            tracemalloc.start()
            with pytest.raises(UserError, match=r"^[^\n]*vectors( is cut short| has |, line )[^\n]*\Z") as caught:
                loaded(tmp_path, content, ["a"] * 50_000)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 2**26 and len(str(caught.value)) < 500


@pytest.mark.parametrize("content", [b"0 5\n", b"0 999999999999\n", b"000 300\n"])
def test_a_file_of_no_vectors_is_an_error(tmp_path, content):
    with pytest.raises(
        UserError, match=r"a first line that says 0+ vectors of \d+ values, but there must be 1 or more"
    ):
        loaded(tmp_path, content, ["a"])


@pytest.mark.parametrize("begin", [b"2 3\n", b"a 1 2 3\n", b"2 3\na 1 2 3\n"])
def test_a_line_without_an_end_is_not_read_into_memory(tmp_path, begin):
    path = tmp_path / "vectors"
    path.write_bytes(begin + b"b 1 2 3 ")
    with path.open("r+b") as file:
        file.truncate(2**30)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"line \d: it has more than \d+ bytes; fix the line|0 complete vectors of 2"):
        load_word_vectors(path, ["a"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26


@pytest.mark.parametrize("value", ["nan", "-inf", "1e39", "1e999"])
def test_a_vector_that_is_not_finite_is_named_if_it_is_asked_for(tmp_path, value):
    content = f"a 1 2\nb\u2028 3 {value}\n".encode()
    assert loaded(tmp_path, content, ["a"]).table.tolist() == [[1, 2]]
    with pytest.raises(UserError, match=r"the vector of 'b\\u2028' is not finite"):
        loaded(tmp_path, content, ["a", "b\u2028"])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_binary_vector_that_is_not_finite_is_named(tmp_path, value):
    with pytest.raises(UserError, match="the vector of b is not finite; fix or delete it"):
        loaded(tmp_path, binary({"a": [1, 2], "b": [3, value]}, size=2), ["a", "b"])


def test_a_damaged_archive_is_an_error(tmp_path):
    whole = gzip.compress(text(VECTORS))
    for damaged in (whole[:5], whole[:40], whole[:10] + b"\xff" + whole[11:], whole[:-8] + bytes(8)):
        with pytest.raises(UserError, match=r"vectors cannot be read: .*; give a complete file of word vectors"):
            loaded(tmp_path, damaged, ["the"])


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"nowhere cannot be read: No such file or directory"):
        load_word_vectors(tmp_path / "nowhere", [])
    with pytest.raises(UserError, match=r"cannot be read: Is a directory"):
        load_word_vectors(tmp_path, [])


@pytest.mark.parametrize("vector", [b"0.5 " * 300, struct.pack("<f", 0.5) * 300])
def test_a_large_file_takes_little_memory(tmp_path, monkeypatch, vector):
    monkeypatch.setattr(word_vectors, "BLOCK", 1 << 16)
    path = tmp_path / "vectors"
    path.write_bytes(b"9000 300\n" + b"".join(b"%d %s\n" % (number, vector) for number in range(9000)))
    tracemalloc.start()
    result = load_word_vectors(path, ["0", "4000", "8999", "9000"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (result.table[:, 299] * 2).tolist() == [1, 1, 1, 0]
    assert peak < 2**20 < path.stat().st_size / 10


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["[CLS]", "the", "##ing", "un", "##", "."], ["[CLS]", "the", "", "un", "", "."]),
        (["<s>", "▁the", "ing", "▁", "▁un", "▁▁x"], ["", "the", "", "", "un", "▁x"]),
        (["<|endoftext|>", "Ġthe", "ing", "Ġ", "ĠcafÃ©", "ĠÐ´Ð°", "##"], ["", "the", "", "", "café", "да", ""]),
        ([" the", "the", " ", " café"], ["the", "", "", "café"]),
        (["the", "ing", "</s>"], ["the", "ing", "</s>"]),
        (["the", "##ing", "##s", "Ġ", "▁"], ["the", "", "", "Ġ", "▁"]),  # whose text had such letters
        ([], []),
    ],
)
def test_the_spelling_of_tokens(tokens, words):
    assert spellings(tokens) == words


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "wordpiece"])
def test_the_tokens_of_our_own_tokenizers_are_words(kind):
    tokenizer = learn(["a café the café is the best"] * 9, kind, 400, ["<pad>", "<s>", "</s>", "<unk>"])
    tokens = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    ids = tokenizer.encode("the café").ids
    found = dict(zip(tokens, spellings(tokens), strict=True))
    assert found[tokens[ids[-1]]] == "café"
    assert found["<pad>"] == found["s"] == ""


def test_the_tokens_of_a_metaspace_vocabulary_are_words():
    tokenizer = tokenizers.SentencePieceBPETokenizer()
    tokenizer.train_from_iterator(["the cat", "the dog"] * 5, vocab_size=60, show_progress=False)
    tokens = tokenizer.encode("the dog").tokens
    assert spellings(tokens) == ["the", "dog"]
