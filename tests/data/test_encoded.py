"""What a tokenizer gives besides ids, for every kind of tokenizer: ours, and those that others publish."""

import pickle

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tests.data.test_tokenizer import KINDS, TEXTS, bert, gpt2, load, train
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError

WORDS = ["March", "größer", "中国", "👩‍👧", "e\u0301t\u00e9", "!", "2025", "<s>"]


def t5():
    """Pieces with a sign for the space before them, after a normalizer that joins accents and takes ligatures apart."""
    letters = sorted(set("".join([*WORDS, *TEXTS, "été", " "])) - {"▁"})
    pieces = ["</s>", "<pad>", "<unk>", "▁", "▁March", *letters, "[CLS]", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(piece, -1.0 - id) for id, piece in enumerate(pieces)], 2, False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>", "<pad>", "<unk>"])
    return tokenizer


def roberta():
    """Bytes, with a template that puts two ends between texts and gives all the type 0."""
    tokenizer = gpt2()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    ids = {token: tokenizer.token_to_id(token) for token in ("<s>", "</s>")}
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    ours = {kind: train(kind, [*TEXTS * 5, " ".join(WORDS)], 900) for kind in KINDS}
    theirs = {"bert": bert(), "gpt2": gpt2(), "t5": t5(), "roberta": roberta()}
    pads = {"gpt2": {"pad": "<|endoftext|>"}}
    return ours | {name: load(theirs[name], folder, **pads.get(name, {})) for name in theirs}


EVERY = [*KINDS, "bert", "gpt2", "t5", "roberta"]
TEXT = "  March größer, 中国 👩‍👧 e\u0301t\u00e9!  ﬁn"


@pytest.mark.parametrize("kind", EVERY)
def test_offsets_are_characters_of_the_text_as_it_was_given(all_kinds, kind):
    tokenizer = all_kinds[kind]
    texts = [TEXT, *TEXTS, ""]
    rows = tokenizer.encode_with_offsets(texts)
    assert [row.ids for row in rows] == tokenizer.encode(texts)
    for text, row in zip(texts, rows, strict=True):
        assert len(row.ids) == len(row.offsets) == len(row.words)
        covered = set()
        for start, end in row.offsets:
            assert 0 <= start < end + (kind == "roberta") <= len(text) + 1  # whose spaces have no length
            assert text[start:end] == text[start:end].strip() or not text[start:end].strip()
            covered |= set(range(start, end))
        if kind != "bert":  # which removes control characters
            assert {index for index, character in enumerate(text) if not character.isspace()} <= covered
        assert row.offsets == sorted(row.offsets)


@pytest.mark.parametrize("kind", EVERY)
def test_the_span_of_a_word_is_the_word(all_kinds, kind):
    (row,) = all_kinds[kind].encode_with_offsets([TEXT])
    for word in ("March", "größer", "中国", "👩‍👧", "e\u0301t\u00e9"):
        first = TEXT.index(word)
        inside = [span for span in row.offsets if first <= span[0] < first + len(word)]
        assert TEXT[inside[0][0] : max(end for _, end in inside)] == word


def test_bytes_of_one_character_have_its_offset(all_kinds):
    for kind in ("bytes", "gpt2", "roberta"):
        (row,) = all_kinds[kind].encode_with_offsets(["é中👍"])
        assert row.offsets == [(0, 1)] * 2 + [(1, 2)] * 3 + [(2, 3)] * 4


def test_words_are_counted_as_the_tokenizer_divides_a_text(all_kinds):
    (row,) = all_kinds["bert"].encode_with_offsets(["Marches, may"])
    assert row == ([0, 1, 3, 2], [(0, 5), (5, 7), (7, 8), (9, 12)], [0, 0, 1, 2])


@pytest.mark.parametrize("kind", EVERY)
def test_ids_of_words_are_those_of_the_text_that_they_make(all_kinds, kind):
    tokenizer = all_kinds[kind]
    sentences = [WORDS, WORDS[::-1], ["March"], [], ["", " "], ["", "March", " ", "中国", ""]]
    for words, row in zip(sentences, tokenizer.encode_words(sentences), strict=True):
        filled = [word for word in words if word.strip()]
        assert [row.ids] == tokenizer.encode([" ".join(filled)])
        assert row.words == sorted(row.words) and len(row.words) == len(row.ids)
        assert set(row.words) == {index for index, word in enumerate(words) if word.strip()}
        for index in set(row.words):
            ids = [id for id, word in zip(row.ids, row.words, strict=True) if word == index]
            first = words[index] == filled[0]
            # A word within a text begins with its space, the first one does not.
            assert [ids] == tokenizer.encode([words[index]]) or not first
            if tokenizer.unknown_id not in ids and kind not in ("bert", "t5"):
                assert tokenizer.decode([ids]) == [words[index] if first else f" {words[index]}"]


def test_a_word_that_the_tokenizer_removes_has_no_id(all_kinds):
    assert all_kinds["bert"].encode_words([["may", "\x00\u200b", "March"]]) == [([2, 0], [0, 2])]


def test_special_tokens_within_words_mean_nothing(all_kinds):
    (row,) = all_kinds["t5"].encode_words([["March", "</s>", "March"]])
    assert 0 not in row.ids and row.words[0] == 0 and row.words[-1] == 2


def test_a_batch_as_berts_users_expect_it(all_kinds):
    batch = all_kinds["bert"](["Marches, may", "may"], ["may", "march [SEP]"])
    assert {name: array.dtype.name for name, array in batch.items()} == dict.fromkeys(batch, "int32")
    assert batch["input_ids"].tolist() == [[6, 0, 1, 3, 2, 7, 2, 7], [6, 2, 7, 0, 4, 4, 4, 7]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1] * 8] * 2
    single = all_kinds["bert"](["Marches, may", "may"])
    assert single["input_ids"].tolist() == [[6, 0, 1, 3, 2, 7], [6, 2, 7, 5, 5, 5]]
    assert single["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]


def test_one_text_is_a_batch_of_one_and_none_is_none(all_kinds):
    assert all_kinds["bert"]("may")["input_ids"].tolist() == [[6, 2, 7]]
    assert all_kinds["bert"]("may", "march", add_special_tokens=False)["input_ids"].tolist() == [[2, 0]]
    assert all_kinds["bert"]([])["input_ids"].shape == (0, 0)


def test_lists_and_fixed_widths(all_kinds):
    lists = all_kinds["bert"](["may", "march may"], padding=False)
    assert lists["input_ids"] == [[6, 2, 7], [6, 0, 2, 7]] and lists["attention_mask"] == [[1] * 3, [1] * 4]
    fixed = all_kinds["bert"](["may", "march may"], padding="max_length", max_length=6)
    assert fixed["input_ids"].tolist() == [[6, 2, 7, 5, 5, 5], [6, 0, 2, 7, 5, 5]]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_template_a_text_is_between_begin_and_end(all_kinds, kind):
    tokenizer = all_kinds[kind]
    (a,), (b,) = tokenizer.encode(["March 4"]), tokenizer.encode(["<s> größer"])
    begin, end = tokenizer.begin_id, tokenizer.end_id
    batch = tokenizer("March 4", "<s> größer")
    assert batch["input_ids"].tolist() == [[begin, *a, end, *b, end]]
    assert batch["token_type_ids"].tolist() == [[0] * (len(a) + 2) + [1] * (len(b) + 1)]
    assert tokenizer("March 4")["input_ids"].tolist() == [[begin, *a, end]]
    assert tokenizer("March 4", max_length=4)["input_ids"].tolist() == [[begin, *a[:2], end]]
    assert tokenizer.encode(["March 4"]) == [a]  # as before


def test_a_template_of_another_kind_is_kept(all_kinds):
    tokenizer = all_kinds["roberta"]
    begin, end = tokenizer.begin_id, tokenizer.end_id
    (a,), (b,) = tokenizer.encode(["ab"]), tokenizer.encode(["c"])
    batch = tokenizer("ab", "c")
    assert batch["input_ids"].tolist() == [[begin, *a, end, end, *b, end]] and not batch["token_type_ids"].any()
    assert tokenizer("ab", "c", max_length=6)["input_ids"].tolist() == [[begin, a[0], end, end, *b, end]]


def test_a_template_without_special_tokens_adds_none(tmp_path):
    theirs = gpt2()
    theirs.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = load(theirs, tmp_path, pad="<|endoftext|>")
    assert tokenizer("ab", "c")["input_ids"].tolist() == [tokenizer.encode(["abc"])[0]]
    assert tokenizer("ab", "c")["token_type_ids"].tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("max_length", range(3, 12))
@pytest.mark.parametrize("texts", [("may " * 6, "march " * 3), ("may", "march " * 9), ("may " * 5, None)])
def test_too_long_is_cut_as_the_library_cuts(all_kinds, max_length, texts):
    reference = bert()
    reference.no_padding()
    reference.enable_truncation(max_length, strategy="longest_first")
    expected = reference.encode(*texts)
    batch = all_kinds["bert"](*texts, max_length=max_length)
    assert batch["input_ids"].tolist() == [expected.ids] and batch["token_type_ids"].tolist() == [expected.type_ids]
    assert len(all_kinds["bert"](*texts)["input_ids"][0]) > 5  # nothing is cut unless a length is given


def test_mistakes_are_named(all_kinds):
    with pytest.raises(UserError, match="there are 2 texts but 1 pairs; give one for each"):
        all_kinds["bert"](["a", "b"], ["c"])
    with pytest.raises(UserError, match="max_length=2 cannot hold the 3 special tokens of a row; give more"):
        all_kinds["bert"]("a", "b", max_length=2)
    with pytest.raises(UserError, match="padding='max_length' needs a max_length"):
        all_kinds["bert"]("a", padding="max_length")


@pytest.mark.parametrize("kind", ["bpe", "bert", "t5"])
def test_a_tokenizer_that_was_sent_to_another_process_gives_the_same(all_kinds, kind):
    all_kinds[kind](TEXT, max_length=5)
    sent = pickle.loads(pickle.dumps(all_kinds[kind]))
    np.testing.assert_array_equal(sent(TEXT)["input_ids"], all_kinds[kind](TEXT)["input_ids"])
    assert sent.encode_with_offsets([TEXT]) == all_kinds[kind].encode_with_offsets([TEXT])
    assert hash(sent) and {all_kinds[kind]: 1}[all_kinds[kind]]


RECORDS = [{"text": f"a{chr(0x4E00 + n)}", "title": "t", "label": n} for n in range(100)]


def test_a_config_learns_from_evenly_spaced_records_and_loads_what_was_saved(tmp_path):
    config = TokenizerConfig(kind="characters", max_records=4)
    tokenizer = config.learn(RECORDS, ("text", "title"), tags=("<de>",))
    known = [n for n in range(100) if tokenizer.find(RECORDS[n]["text"][1]) is not None]
    assert known == [0, 25, 50, 75] and tokenizer.find("t") is not None and tokenizer.find("<de>") is not None
    tokenizer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    loaded = config.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.encode(["<de>a"]) == tokenizer.encode(["<de>a"])
    tokenizer.save_file(tmp_path / "other.json")
    given = TokenizerConfig(path=tmp_path / "other.json").learn([], (), tags=("<fr>",))
    assert given.encode(["a"]) == tokenizer.encode(["a"]) and given.find("<fr>") == tokenizer.vocab_size
    with pytest.raises(UserError, match=r"no text to train a tokenizer on; give one with --processor.path"):
        config.learn(RECORDS, ())


def test_the_same_tokenizer_with_special_tokens_of_other_names(all_kinds):
    before = all_kinds["gpt2"]
    other = before.with_config(TokenizerConfig(pad="<pad>", begin="[CLS]", add_begin=True))
    assert {other.pad_id, other.begin_id} == {before.vocab_size, before.vocab_size + 1}
    assert other.tokens([other.pad_id, other.begin_id]) == ["<pad>", "[CLS]"]
    assert other.end_id == before.end_id and other.add_begin and not before.add_begin
    assert before.find("<pad>") is None and other.encode(TEXTS) == before.encode(TEXTS)
    assert isinstance(other, Tokenizer)
