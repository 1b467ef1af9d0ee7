import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.tokenizers import check_vocabulary, load_tokenizer, save_tokenizer

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cat",
    "cafe",
    "##s",
    ".",
    "Cat",
    "café",
    "中",
    "国",
    "中国",
]
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
PIECES += ["t", "h", "e", "c", "a", "Ġ", "Ã", "©", "th", "the", "Ġc", "Ġca", "Ã©"]
MERGES = ["#version: 0.2", "t h", "th e", "Ġ c", "Ġc a", "Ã ©"]
TEXTS = ["The cats.", "the CAFÉ, the café", "中国 cat", "unknown Cat . ", "", "the\tcat\ncat\u200b"]


def write(folder: Path, **files) -> Path:
    """Files by their names, in which __ is a dot: text as it is, lines, or JSON."""
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(f"{line}\n" for line in content)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def pieces(names: list[str] = PIECES) -> dict[str, int]:
    return {name: id for id, name in enumerate(names)}


def whole(special: list[str]) -> str:
    """A tokenizer.json of words, some of which are special."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(pieces([*special, "the", "cat"]), unk_token="<unk>"))
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str()


def roles(tokenizer: Tokenizer | None) -> list[str]:
    """The tokens for padding, and for the beginning and the end of a text."""
    assert tokenizer is not None
    return tokenizer.tokens([tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id])


def test_a_tokenizer_json_is_read_with_its_special_tokens(tmp_path):
    trained = Tokenizer.train(["the cat, the café"] * 9, TokenizerConfig(vocab_size=60, pad="<nil>", end="<stop>"))
    save_tokenizer(trained, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None and again.encode(TEXTS) == trained.encode(TEXTS)
    assert roles(again) == ["<nil>", "<s>", "<stop>"]
    assert again.fingerprint == trained.fingerprint


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_lower_case": True}, ["the", "cafe", "##s", "cat", ".", "中", "国", "[UNK]"]),
        ({"do_lower_case": False}, ["[UNK]", "café", "##s", "Cat", ".", "中", "国", "[UNK]"]),
        ({"do_lower_case": True, "strip_accents": False}, ["the", "café", "##s", "cat", ".", "中", "国", "[UNK]"]),
        ({"do_lower_case": False, "strip_accents": True}, ["[UNK]", "cafe", "##s", "Cat", ".", "中", "国", "[UNK]"]),
        (
            {"do_lower_case": True, "tokenize_chinese_chars": False},
            ["the", "cafe", "##s", "cat", ".", "中国", "[UNK]"],
        ),
    ],
)
def test_words_are_read_as_their_settings_say(tmp_path, settings, expected):
    tokenizer = load_tokenizer(write(tmp_path, vocab__txt=WORDS, tokenizer_config__json=settings))
    (ids,) = tokenizer.encode(["The cafés Cat. 中国 dog"])
    assert tokenizer.tokens(ids) == expected
    assert roles(tokenizer) == ["[PAD]", "[CLS]", "[SEP]"] and tokenizer.unknown_id == WORDS.index("[UNK]")


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        (["The", "cat", "sat"], {}, ["The", "cat"]),
        (["The", "cat", "sat"], {"do_lower_case": None}, ["The", "cat"]),
        (["The", "cat", "sat"], {"do_lower_case": True}, ["[UNK]", "cat"]),
        (["T", "##HE", "cat"], {}, ["[UNK]", "cat"]),
        (["the", "##The", "cat"], {}, ["[UNK]", "cat"]),
        (["the", "cat", "Über"], {}, ["[UNK]", "cat"]),
        (["the", "cat", "Дом"], {}, ["[UNK]", "cat"]),
        (["the", "cat", "[unused1]", "[X]", "<GO>"], {}, ["the", "cat"]),
        (["the", "cat", "ß", "中", "ⁿ", "##ing"], {}, ["the", "cat"]),
        (["the", "cat"], {"do_lower_case": False}, ["[UNK]", "cat"]),
    ],
)
def test_a_vocabulary_says_whether_it_is_cased_where_nothing_else_does(tmp_path, words, settings, expected):
    files = {"tokenizer_config__json": settings} if settings else {}
    tokenizer = load_tokenizer(write(tmp_path, vocab__txt=[*SPECIAL, *words], **files))
    assert tokenizer.tokens(tokenizer.encode(["The cat"])[0]) == expected


def test_accents_stay_in_a_cased_vocabulary(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, vocab__txt=[*SPECIAL, "Café", "café"]))
    assert tokenizer.tokens(tokenizer.encode(["Café café"])[0]) == ["Café", "café"]


def byte_pairs(*names: str, post_processor=None) -> tokenizers.Tokenizer:
    """Bytes, after some special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces([*names, *alphabet]), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(names))
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


GPT2 = byte_pairs("<|endoftext|>", post_processor=processors.ByteLevel(trim_offsets=False)).to_str()
BEGINS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
ENDS = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
LLAMA = byte_pairs("<s>", "</s>", post_processor=BEGINS).to_str()
T5 = byte_pairs("<s>", "</s>", post_processor=ENDS).to_str()
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer__json": GPT2}, False),
        ({"tokenizer__json": GPT2, "tokenizer_config__json": {"add_bos_token": False}}, False),
        ({"tokenizer__json": GPT2, "tokenizer_config__json": {"add_bos_token": True}}, True),
        ({"tokenizer__json": LLAMA, "tokenizer_config__json": NAMED}, True),
        ({"tokenizer__json": LLAMA, "special_tokens_map__json": NAMED}, True),
        ({"tokenizer__json": LLAMA, "tokenizer_config__json": NAMED | {"add_bos_token": None}}, True),
        ({"tokenizer__json": LLAMA, "tokenizer_config__json": NAMED | {"add_bos_token": False}}, False),
        ({"tokenizer__json": byte_pairs("<s>", "</s>").to_str(), "tokenizer_config__json": NAMED}, False),
        ({"tokenizer__json": T5, "tokenizer_config__json": NAMED}, False),
        ({"vocab__json": pieces(), "merges__txt": MERGES}, False),
        ({"vocab__json": pieces(), "merges__txt": MERGES, "tokenizer_config__json": {"add_bos_token": True}}, True),
        ({"vocab__txt": WORDS}, True),
    ],
)
def test_a_prompt_begins_as_the_tokenizer_would_begin_it(tmp_path, files, expected):
    assert load_tokenizer(write(tmp_path, **files)).add_begin is expected


@pytest.mark.parametrize("size", [3, 4])
def test_a_model_must_have_an_embedding_for_every_id(tmp_path, size):
    names = ["<pad>", "</s>", "<unk>"]
    tokenizer = load_tokenizer(write(tmp_path, tokenizer__json=whole([*names, "<new>"][:size])))
    check_vocabulary(tokenizer, tokenizer.vocab_size)
    check_vocabulary(tokenizer, tokenizer.vocab_size + 28)
    count = tokenizer.vocab_size
    message = rf"^the tokenizer has {count} ids but the model's vocab_size is {count - 1} \(without room for cat\)"
    with pytest.raises(UserError, match=message):
        check_vocabulary(tokenizer, count - 1)


def test_words_may_have_other_special_tokens(tmp_path):
    names = {"unk_token": "<what>", "cls_token": "<go>", "sep_token": "<stop>", "pad_token": "<nil>"}
    words = [*names.values(), "the", "cat"]
    tokenizer = load_tokenizer(write(tmp_path, vocab__txt=words, special_tokens_map__json=names))
    assert tokenizer.encode(["the dog"]) == [[4, 0]]
    assert roles(tokenizer) == ["<nil>", "<go>", "<stop>"] and tokenizer.unknown_id == 0


@pytest.mark.parametrize(("settings", "first"), [({}, ["c", "a"]), ({"add_prefix_space": True}, ["Ġca"])])
def test_byte_pairs_are_merged_in_their_order(tmp_path, settings, first):
    folder = write(tmp_path, vocab__json=pieces(), merges__txt=MERGES, tokenizer_config__json=settings)
    tokenizer = load_tokenizer(folder)
    expected = [*first, "t", "Ġca", "the", "Ġ", "th", "Ã©"]
    assert tokenizer.encode(["cat cathe thé"]) == [[PIECES.index(piece) for piece in expected]]
    assert tokenizer.decode(tokenizer.encode(["cat cathe thé"]))[0].strip() == "cat cathe thé"
    assert roles(tokenizer) == ["<|endoftext|>"] * 3


def test_a_tokenizer_json_goes_before_the_files_of_old(tmp_path):
    assert load_tokenizer(write(tmp_path, vocab__json=pieces(), merges__txt=MERGES)).vocab_size == len(PIECES)
    assert load_tokenizer(write(tmp_path, vocab__txt=WORDS)).vocab_size == len(WORDS)
    assert load_tokenizer(write(tmp_path, tokenizer__json=whole(["<pad>", "</s>", "<unk>"]))).vocab_size == 5


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        ({"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"}, ["<pad>", "<s>", "</s>"]),
        ({"cls_token": "<mask>", "bos_token": "<s>", "sep_token": "<unk>", "eos_token": "</s>"}, "</s> <mask> <unk>"),
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}, ["<pad>", "<s>", "</s>"]),
        ({"eos_token": "</s>", "pad_token": "<pad>"}, ["<pad>", "<pad>", "</s>"]),
        ({"bos_token": "<s>", "eos_token": "</s>"}, ["</s>", "<s>", "</s>"]),
        ({"eos_token": "</s>", "unk_token": "<unk>"}, ["</s>", "</s>", "</s>"]),
        ({"sep_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>"}, ["<unk>", "<s>", "</s>"]),
        ({"eos_token": "</s>", "pad_token": "<absent>"}, ["</s>", "</s>", "</s>"]),
        ({"eos_token": "</s>", "pad_token": None, "add_bos_token": True}, ["</s>", "</s>", "</s>"]),
        ({"eos_token": "</s>", "pad_token": {"content": 3}}, ["</s>", "</s>", "</s>"]),
        ({"eos_token": "</s>", "pad_token": 3}, ["</s>", "</s>", "</s>"]),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config__json", "special_tokens_map__json"])
@pytest.mark.parametrize("spelling", ["text", "object"])
def test_special_tokens_have_the_roles_that_they_have_in_transformers(tmp_path, special, expected, name, spelling):
    if spelling == "object":
        special = {
            name: {"content": token, "lstrip": False, "special": True} if isinstance(token, str) else token
            for name, token in special.items()
        }
    files = {"tokenizer__json": whole(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), name: special}
    expected = expected.split() if isinstance(expected, str) else expected
    assert roles(load_tokenizer(write(tmp_path, **files))) == expected


def test_the_map_of_special_tokens_goes_before_the_settings(tmp_path):
    write(tmp_path, tokenizer__json=whole(["<s>", "<pad>", "</s>", "<unk>"]))
    write(tmp_path, tokenizer_config__json={"eos_token": "<s>", "pad_token": "<pad>"})
    write(tmp_path, special_tokens_map__json={"eos_token": {"content": "</s>"}})
    assert roles(load_tokenizer(tmp_path)) == ["<pad>", "<pad>", "</s>"]


def test_special_tokens_that_nothing_names_are_known_by_their_names(tmp_path):
    for number, special in enumerate((["<pad>", "<s>", "</s>", "<unk>"], ["[PAD]", "[CLS]", "[SEP]", "<unk>"])):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        assert roles(load_tokenizer(write(folder, tokenizer__json=whole(special)))) == special[:3]


@pytest.mark.parametrize("files", [{}, {"vocab__json": pieces()}, {"merges__txt": MERGES}, {"spiece__model": "\x00"}])
def test_where_there_is_no_tokenizer_there_is_none(tmp_path, files):
    assert load_tokenizer(write(tmp_path, **files, tokenizer_config__json={"eos_token": "</s>"})) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{"}, "the tokenizer in {folder} cannot be read: "),
        ({"tokenizer__json": ""}, "the tokenizer in {folder} cannot be read: "),
        ({"tokenizer__json": '{"model": {"type": "Magic"}}'}, "the tokenizer in {folder} cannot be read: "),
        ({"vocab__json": "[]", "merges__txt": MERGES}, "the tokenizer in {folder} cannot be read: "),
        ({"vocab__json": pieces(), "merges__txt": "t\n"}, "the tokenizer in {folder} cannot be read: "),
        ({"vocab__txt": ["the", "cat"]}, "the tokenizer in {folder} cannot be read: "),
        ({"vocab__txt": WORDS, "tokenizer_config__json": "{"}, "{folder}/tokenizer_config.json cannot be read: "),
        (
            {"vocab__txt": WORDS, "tokenizer_config__json": "[]"},
            "{folder}/tokenizer_config.json does not hold a JSON object",
        ),
        (
            {"vocab__txt": WORDS, "tokenizer_config__json": "[" * 99_999},
            "{folder}/tokenizer_config.json cannot be read: ",
        ),
        (
            {"vocab__txt": WORDS, "tokenizer_config__json": "9" * 9999},
            "{folder}/tokenizer_config.json cannot be read: ",
        ),
        ({"vocab__txt": WORDS, "special_tokens_map__json": "x"}, "{folder}/special_tokens_map.json cannot be read: "),
        (
            {"vocab__txt": WORDS, "special_tokens_map__json": "3"},
            "{folder}/special_tokens_map.json does not hold a JSON",
        ),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, files, message):
    with pytest.raises(UserError) as caught:
        load_tokenizer(write(tmp_path, **files))
    assert str(caught.value).startswith(message.format(folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    write(tmp_path, vocab__txt=WORDS)
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"eos_token": "\xff"}')
    with pytest.raises(UserError, match=r"tokenizer_config.json cannot be read: .*decode"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("BertTokenizer", {"do_lower_case": True}),
        ("BertTokenizer", {"do_lower_case": False}),
        ("BertTokenizer", {"do_lower_case": True, "strip_accents": False}),
        ("BertTokenizer", {"do_lower_case": True, "tokenize_chinese_chars": False}),
        ("GPT2Tokenizer", {}),
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("RobertaTokenizer", {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    ],
)
def test_ids_are_those_of_transformers(tmp_path, transformers, kind, settings):
    if kind == "BertTokenizer":
        write(tmp_path, vocab__txt=WORDS)
    else:
        write(tmp_path, vocab__json=pieces(), merges__txt=MERGES)
    write(tmp_path, tokenizer_config__json=settings | {"tokenizer_class": kind})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = TEXTS if kind == "BertTokenizer" else ["the cat cathe", " thé  cat ", "", "the\tcat\n"]
    assert ours.encode(texts) == [theirs(text, add_special_tokens=False).input_ids for text in texts]
    if kind != "GPT2Tokenizer":
        expected = [theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id]
        assert [ours.pad_id, ours.begin_id, ours.end_id] == expected
    else:
        assert {ours.pad_id, ours.begin_id, ours.end_id} == {theirs.eos_token_id}


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram", "wordpiece", "characters", "bytes"])
def test_transformers_loads_a_tokenizer_that_was_trained_here(tmp_path, transformers, kind):
    config = TokenizerConfig(300, kind, pad="<nil>", begin="<go>")
    ours = Tokenizer.train(["the cat, the café: 中国 12"] * 9, config, tags=("<de>",))
    save_tokenizer(ours, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, "<de> the cat"]
    assert [theirs(text, add_special_tokens=False).input_ids for text in texts] == ours.encode(texts)
    assert (theirs.pad_token, theirs.bos_token, theirs.eos_token) == ("<nil>", "<go>", "</s>")
    assert (theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id) == (ours.pad_id, ours.begin_id, ours.end_id)
    assert theirs.unk_token_id == ours.unknown_id
    assert theirs.decode(ours.encode(["the cat"])[0]) == "the cat"


EXPECTED = {
    "bert": "begin text end",
    "roberta": "begin text end",
    "distilbert": "begin text end",
    "gpt2": "begin text",
    "llama": "begin text",
    "t5": "text end",
    "marian": "text end",
    "pegasus": "text end",
    "xlnet": "text end begin",
    None: "text",
}


def assert_same(theirs, ours: Tokenizer, texts: list[str], around: str) -> None:
    """The same ids for the same text, with special tokens around it."""
    for text in texts:
        (ids,) = ours.encode([text])
        parts = {"begin": [ours.begin_id], "end": [ours.end_id], "text": ids}
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs(text).input_ids == [id for part in around.split() for id in parts[part]]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode([ids])[0]


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram", "wordpiece", "characters", "bytes"])
@pytest.mark.parametrize("model_type", EXPECTED)
def test_transformers_reads_a_text_as_the_model_was_trained_to(tmp_path, transformers, kind, model_type):
    ours = Tokenizer.train(["the cat , the café : 中国 12 do n't"] * 9, TokenizerConfig(300, kind)).with_begin(True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
    save_tokenizer(ours, tmp_path, model_type=model_type, max_length=77)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same(theirs, ours, ["the cat , do n't .", " the  café ", "中国 12", ""], EXPECTED[model_type])
    assert theirs.model_max_length == 77
    assert ("token_type_ids" in theirs("the cat")) == (model_type == "bert")
    again = load_tokenizer(tmp_path)
    assert again.encode(TEXTS) == ours.encode(TEXTS) and again.add_begin == EXPECTED[model_type].startswith("begin")


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram", "wordpiece", "characters", "bytes"])
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "xlnet"])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_the_mask_of_a_model_is_that_of_its_tokenizer(tmp_path, transformers, kind, model_type, extra):
    ours = Tokenizer.train(["the cat , the café : 中国"] * 9, TokenizerConfig(300, kind), tags=("<de>",))
    save_tokenizer(ours, tmp_path, model_type=model_type, vocab_size=ours.vocab_size + extra)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    if not extra or model_type == "xlnet":
        assert theirs.mask_token is None and again.mask_id is None
        return
    assert theirs.mask_token_id == again.mask_id == ours.vocab_size
    before, after = ours.encode(["the" if ours.spaces_begin_words else "the ", " cat"])
    assert theirs("the [MASK] cat", add_special_tokens=False).input_ids == [*before, ours.vocab_size, *after]
    assert again.encode(["the [MASK] cat"], allow=("[MASK]",)) == [[*before, ours.vocab_size, *after]]


def test_a_pair_of_texts_is_what_bert_reads(tmp_path, transformers):
    ours = Tokenizer.train(["the cat"] * 9, TokenizerConfig(60))
    save_tokenizer(ours, tmp_path, model_type="bert")
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path)("the", "cat")
    first, second = ours.encode(["the", "cat"])
    assert pair.input_ids == [ours.begin_id, *first, ours.end_id, *second, ours.end_id]
    assert pair.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("content", [GPT2, LLAMA, T5])
@pytest.mark.parametrize("add_begin", [False, True])
def test_transformers_begins_a_prompt_as_we_do(tmp_path, transformers, model_type, content, add_begin):
    (tmp_path / "theirs").mkdir()
    settings = {"add_bos_token": add_begin, **({} if content is GPT2 else NAMED)}
    ours = load_tokenizer(write(tmp_path / "theirs", tokenizer__json=content, tokenizer_config__json=settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_tokenizer(ours, tmp_path, model_type=model_type)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same(theirs, ours, ["a cat", " a"], "begin text" if add_begin else "text")
    assert load_tokenizer(tmp_path).add_begin is add_begin
    assert theirs("a").keys() == {"input_ids", "attention_mask"}


def test_transformers_loads_a_tokenizer_that_it_saved_before(tmp_path, transformers):
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    write(tmp_path / "theirs", vocab__txt=WORDS, tokenizer_config__json={"tokenizer_class": "BertTokenizer"})
    first = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    first.save_pretrained(tmp_path / "theirs")
    save_tokenizer(load_tokenizer(tmp_path / "theirs"), tmp_path / "ours")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert [again(text).input_ids for text in TEXTS] == [first(text).input_ids for text in TEXTS]
    assert again("the cat", "the café").input_ids == first("the cat", "the café").input_ids
    for role in ("pad", "cls", "sep", "unk", "mask"):
        assert getattr(again, f"{role}_token_id") == getattr(first, f"{role}_token_id")
