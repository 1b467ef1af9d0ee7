import pickle
from random import Random
from typing import get_args

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from transformer_jax.data import Dates, Tokenizer, TokenizerConfig
from transformer_jax.data.tokenizer_training import Kind
from transformer_jax.errors import UserError

KINDS = get_args(Kind)
TEXTS = [
    "Tuesday, March 4, 2025",
    "Dienstag, 4. März 2025: Straße, größer",
    "вторник, 4 марта",
    "الثلاثاء ٤ مارس",
    "मंगलवार, 4 मार्च",
    "2025年3月4日星期二",
    "2025年3月4日火曜日、カタカナ",
    "2025년 3월 4일 화요일",
    "วันอังคารที่ 4 มีนาคม",
    "👩‍👩‍👧‍👦 and 🇩🇪, 👍🏽!",
    "e\u0301 is not é",
    "3\u202f909,55 km",
    "  two  spaces ",
    "\ttabs\tand\r\nlines\n\n",
    "line\u2028separator and \x85",
    "\x00 control \x1b[0m",
    "C# ##x ###",
    "<s> and </s> and <pad> and <unk> and <0x41>",
]
TAGS = ("<de>", "<ja>")


def train(kind, texts=TEXTS, vocab_size=700, tags=TAGS, **names):
    return Tokenizer.train(iter(texts), TokenizerConfig(vocab_size, kind, **names), tags=tags)


@pytest.fixture(scope="module")
def trained():
    return {kind: train(kind, TEXTS * 5) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives(trained, kind):
    texts = [*TEXTS, "", " ", "<de> March 4", "a < b <ja>\n<de>"]
    assert trained[kind].decode(trained[kind].encode(texts)) == texts


@pytest.mark.parametrize("kind", ["byte_bpe", "bytes", "unigram"])
def test_characters_that_were_never_seen_survive_as_bytes(kind):
    rng = Random(0)
    noise = ["".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(99))] * 20
    tokenizer = train(kind, ["Only English is known here."] * 5)
    ids = tokenizer.encode([*TEXTS, *noise])
    assert tokenizer.decode(ids) == [*TEXTS, *noise]
    assert (tokenizer.unknown_id is None) == (kind != "unigram")
    assert tokenizer.unknown_id not in {id for row in ids for id in row}


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_only_a_character_that_was_never_seen_is_unknown(trained, kind):
    (ids,) = trained[kind].encode(["March ☃☃4"])
    assert ids.count(trained[kind].unknown_id) == 2
    assert trained[kind].decode([ids]) == ["March 4"]


def test_a_wordpiece_is_unknown_by_the_word_and_by_the_chinese_character(trained):
    tokenizer = trained["wordpiece"]
    assert tokenizer.decode(tokenizer.encode(["two Marẋch spaces, 星鯖期"])) == ["two spaces, 星期"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_cut_inside_a_character_is_still_decoded(trained, kind):
    (ids,) = trained[kind].encode(["März 👩‍👩‍👧‍👦"])
    for length in range(len(ids)):
        (text,) = trained[kind].decode([ids[:length]])
        assert "März 👩‍👩‍👧‍👦".startswith(text.rstrip("\ufffd"))
    assert text.startswith("März ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a" * 200_000, "two spaces " * 20_000, "วันอังคารที่" * 10_000])
def test_a_long_text_survives(trained, kind, text):
    assert trained[kind].decode(trained[kind].encode([text])) == [text]


@pytest.mark.parametrize("kind", KINDS)
def test_tags_are_single_tokens_and_digits_stay_apart(trained, kind):
    (ids,) = trained[kind].encode(["<de> 2025"])
    assert trained[kind].tokens(ids) == ["<de>", " ", "2", "0", "2", "5"]


def test_characters_and_bytes_are_not_merged(trained):
    (characters,), (single_bytes,) = (trained[kind].encode(["größer"]) for kind in ("characters", "bytes"))
    assert trained["characters"].tokens(characters) == list("größer")
    assert len(single_bytes) == len("größer".encode())


def test_tokens_are_shown_as_text(trained):
    (ids,) = trained["byte_bpe"].encode(["<de> größer"])
    assert "".join(trained["byte_bpe"].tokens(ids)) == "<de> größer"
    assert trained["byte_bpe"].tokens([trained["byte_bpe"].pad_id]) == ["<pad>"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_mean_nothing(trained, kind):
    (expected,) = trained[kind].encode(["</s><pad><s>"])
    assert trained[kind].decode([expected]) == ["</s><pad><s>"]
    assert not {trained[kind].pad_id, trained[kind].begin_id, trained[kind].end_id} & set(expected)
    assert pickle.loads(pickle.dumps(trained[kind])).encode(["</s><pad><s>"]) == [expected]


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_distinct_and_left_out_of_the_text(trained, kind):
    tokenizer = trained[kind]
    ids = [tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id, tokenizer.unknown_id]
    if kind in ("byte_bpe", "bytes"):
        assert ids.pop() is None
    assert len(set(ids)) == len(ids) and max(ids) < tokenizer.vocab_size <= 700
    (march,) = tokenizer.encode(["March"])
    assert tokenizer.decode([[*ids, *march, *ids]]) == ["March"]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(trained, kind, tmp_path):
    trained[kind].save(tmp_path)
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode([*TEXTS, "<de> 5"]) == trained[kind].encode([*TEXTS, "<de> 5"])
    for name in ("vocab_size", "fingerprint", "pad_id", "begin_id", "end_id", "unknown_id"):
        assert getattr(loaded, name) == getattr(trained[kind], name)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic(kind, tmp_path):
    data = Dates(train_size=400)
    files = set()
    for _ in range(3):
        texts = (text for record in data.split("train") for text in record.values())
        Tokenizer.train(texts, TokenizerConfig(600, kind), tags=data.tags()).save(tmp_path)
        files.add((tmp_path / "tokenizer.json").read_bytes())
    assert len(files) == 1


def test_fingerprint_tells_content_and_special_ids_apart(trained, tmp_path):
    assert len({tokenizer.fingerprint for tokenizer in trained.values()}) == len(KINDS)
    trained["bpe"].save(tmp_path)
    swapped = Tokenizer.load(tmp_path / "tokenizer.json", TokenizerConfig(begin="</s>", end="<s>"))
    assert swapped.fingerprint != trained["bpe"].fingerprint


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_special_tokens_have_the_names_they_are_given(kind, tmp_path):
    names = {"pad": "[PAD]", "begin": "<|text|>", "end": "<|text|>", "unknown": "[?x]"}
    tokenizer = train(kind, **names)
    assert tokenizer.decode(tokenizer.encode(TEXTS)) == TEXTS
    assert tokenizer.tokens([0, 1, 2]) == ["[PAD]", "<|text|>", "[?x]"]
    assert (tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id, tokenizer.unknown_id) == (0, 1, 1, 2)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path / "tokenizer.json", TokenizerConfig(**names))
    assert loaded.fingerprint == tokenizer.fingerprint


def bert():
    """Lower case, ## inside words, and the padding at 5; with the padding and truncation of some published files."""
    tokens = ["march", "##es", "may", ",", "[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({token: id for id, token in enumerate(tokens)}))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder, tokenizer.post_processor = (
        decoders.WordPiece(),
        processors.BertProcessing(("[SEP]", 7), ("[CLS]", 6)),
    )
    tokenizer.add_special_tokens(["[UNK]", "[PAD]", "[CLS]", "[SEP]"])
    tokenizer.enable_padding(pad_id=5, pad_token="[PAD]", length=6)
    tokenizer.enable_truncation(2)
    return tokenizer


def gpt2():
    """Bytes, and one special token for begin and end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def t5():
    """Pieces among which the special tokens are, none of them for the begin; the padding at 1."""
    pieces = ["</s>", "<pad>", "<unk>", "▁", "▁March", "es"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(piece, -float(id)) for id, piece in enumerate(pieces)], 2, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>", "<pad>", "<unk>"])
    return tokenizer


def load(tokenizer, tmp_path, tags=(), **names):
    tokenizer.save(str(tmp_path / "theirs.json"))
    return Tokenizer.load(tmp_path / "theirs.json", TokenizerConfig(**names), tags=tags)


def special_ids(tokenizer):
    return tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id, tokenizer.unknown_id


def test_a_tokenizer_like_berts_is_understood(tmp_path):
    tokenizer = load(bert(), tmp_path, tags=("<DE>",))
    assert special_ids(tokenizer) == (5, 6, 7, 4)
    assert tokenizer.encode(["<DE> Marches, may [PAD]", "may"]) == [[8, 0, 1, 3, 2, 4, 4, 4], [2]]
    assert tokenizer.decode([[6, 0, 1, 3, 2, 7, 5]]) == ["marches, may"]


def test_a_tokenizer_like_gpt2s_is_understood_once_the_padding_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no pad token.*--processor.pad TOKEN.*\(<\|endoftext\|>\)"):
        load(gpt2(), tmp_path)
    assert special_ids(load(gpt2(), tmp_path, pad="<|endoftext|>")) == (256, 256, 256, None)
    tokenizer = load(gpt2(), tmp_path, pad="<pad>")
    assert special_ids(tokenizer) == (257, 256, 256, None) and tokenizer.vocab_size == 258
    texts = [*TEXTS, "<|endoftext|><pad>"]
    assert tokenizer.decode(tokenizer.encode(texts)) == texts
    assert tokenizer.decode([[257, *tokenizer.encode(["March"])[0], 256]]) == ["March"]
    tokenizer.save(tmp_path)
    assert special_ids(Tokenizer.load(tmp_path / "tokenizer.json")) == (257, 256, 256, None)


def test_a_tokenizer_like_t5s_is_understood_and_finds_no_special_token_in_a_text(tmp_path):
    tokenizer = load(t5(), tmp_path)
    assert special_ids(tokenizer) == (1, 0, 0, 2)
    assert tokenizer.encode(["Marches </s>"]) == [[4, 5, 3, 2]]
    assert tokenizer.decode([[4, 5, 0, 1]]) == ["Marches"]


def test_a_token_that_is_named_is_special_from_then_on(tmp_path):
    theirs = gpt2()
    theirs.add_tokens([AddedToken("[end]", special=False)])
    tokenizer = load(theirs, tmp_path, pad="!", end="[end]", unknown="?")
    assert tokenizer.tokens(special_ids(tokenizer)) == ["!", "<|endoftext|>", "[end]", "?"]
    (ids,) = tokenizer.encode(["a[end]"])
    assert tokenizer.decode([[*ids, tokenizer.pad_id, tokenizer.end_id]]) == ["a[end]"]


def test_ids_with_gaps_are_counted_to_the_last(tmp_path):
    theirs = tokenizers.Tokenizer(models.WordLevel({"<pad>": 3, "</s>": 9, "<unk>": 4}, unk_token="<unk>"))
    theirs.add_special_tokens(["<pad>", "</s>"])
    tokenizer = load(theirs, tmp_path)
    assert special_ids(tokenizer) == (3, 9, 9, 4) and tokenizer.vocab_size == 10


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no tokenizer at .*nothing.json"):
        Tokenizer.load(tmp_path / "nothing.json")
    with pytest.raises(UserError, match=r"it is a folder; name the tokenizer.json in it"):
        Tokenizer.load(tmp_path)
    for content in (b"", b"{}", b"\xff\x00", b'{"vocab": {"a": 0}}'):
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(UserError, match=r"other.json is not a tokenizer.json.*") as error:
            Tokenizer.load(tmp_path / "other.json")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="unknown='<what>' is not a token"):
        load(t5(), tmp_path, unknown="<what>")


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("bpe", 4 + 2 + 3),
        ("characters", 4 + 2 + 3),
        ("wordpiece", 4 + 2 + 3),
        ("unigram", 4 + 2 + 3 + 256),
        ("byte_bpe", 3 + 2 + 256),
        ("bytes", 3 + 2 + 256),
    ],
)
def test_the_least_vocabulary_is_named_and_is_enough(kind, least):
    texts = ["<de>aab aab", "baa"]
    for vocab_size in (1, least - 1):
        with pytest.raises(UserError, match=f"vocab_size={vocab_size} cannot hold .*give at least {least}"):
            train(kind, texts, vocab_size)
    tokenizer = train(kind, texts, least)
    assert tokenizer.vocab_size == least
    assert tokenizer.decode(tokenizer.encode(texts)) == texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [[], ["", "<de>"]])
def test_without_text_there_is_nothing_to_learn_but_bytes(kind, texts):
    if kind == "bytes":
        assert train(kind, texts).vocab_size == 256 + 3 + 2
    else:
        with pytest.raises(UserError, match=f"no text to train a tokenizer of kind '{kind}'"):
            train(kind, texts)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="kind='words' is not known; choose among bpe, byte_bpe"):
        TokenizerConfig(kind="words")
    with pytest.raises(UserError, match="max_records must be at least 1; got 0"):
        TokenizerConfig(max_records=0)
    with pytest.raises(UserError, match="special token 'March' could be a word"):
        train("bpe", end="March")
    with pytest.raises(UserError, match="name </s> twice"):
        train("bpe", pad="</s>")
    with pytest.raises(UserError, match="the tag '<é>' does not survive"):
        train("byte_bpe", tags=("<é>",))
    with pytest.raises(UserError, match="the tag '<s>' does not survive"):
        train("bpe", tags=("<s>",))


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [
        ([[2, 2, 2], [1, 3]], 0.5, "3 of 3 tokens are unknown to the tokenizer (<unk>) in 1 of 2 texts; check its"),
        ([[2, 1], [2], [1], []], 0.5, "2 of 3 tokens are unknown to the tokenizer (<unk>) in 2 of 4 texts; check its"),
        ([np.array([1] * 9 + [2])], 0.1, "1 of 10 tokens are unknown to the tokenizer (<unk>) in 1 of 1 texts; check"),
        ([[1, 1, 2]], 0.5, None),
        ([[], [1]], 0.5, None),
        ([[], [1]], 0.0, None),
        ([], 0.5, None),
    ],
)
def test_texts_that_are_mostly_unknown_are_told_once(tmp_path, recwarn, rows, share, expected):
    load(t5(), tmp_path).warn_if_unknown(rows, "texts", share=share)
    assert [str(warning.message)[: len(expected or "")] for warning in recwarn] == ([expected] if expected else [])


def test_what_writes_everything_has_nothing_unknown(recwarn):
    tokenizer = train("byte_bpe")
    tokenizer.warn_if_unknown(tokenizer.encode(TEXTS), "texts", share=0.0)
    assert not recwarn.list
