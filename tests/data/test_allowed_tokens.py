import pickle

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError

SENTENCES = ["the [MASK] sat.", "[MASK]", "the[MASK]the", "the  [MASK], [MASK][MASK]the", "no mask", ""]


def vocabulary(*tokens: str) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def bert() -> tokenizers.Tokenizer:
    """Lower case and ## inside words."""
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##the", "sat", ".", ",", "[", "]", "mask", "no")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary(*words), unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(words[:5]))
    return tokenizer


def roberta() -> tokenizers.Tokenizer:
    """Byte pairs, and a mask that takes the space before it."""
    names = ("<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "<mask>")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary(*names), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*names[:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


def xlnet(prepend_scheme: str = "always", *more: str) -> tokenizers.Tokenizer:
    """Pieces among which the special tokens are."""
    names = ("<unk>", "<pad>", "<s>", "</s>", "<mask>", "▁the", "the", "▁", "▁sat", ".", ",", "no", "m", "a", "s", "k")
    names += more
    pieces = [(name, -float(id)) for id, name in enumerate(names)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens([*names[:4], AddedToken("<mask>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize("make", [bert, roberta, xlnet, lambda: xlnet("first")])
def test_a_mask_is_found_where_the_library_finds_it(make):
    ours, theirs = Tokenizer(make()), make()
    expected = [text.replace("[MASK]", ours.mask_token) for text in SENTENCES]
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in expected]
    assert expected[0].count(ours.mask_id) == 1 and expected[3].count(ours.mask_id) == 3
    assert ours.encode(SENTENCES, allow=("[MASK]",)) == expected
    assert ours.encode([text.replace("[MASK]", ours.mask_token) for text in SENTENCES], allow=("[MASK]",)) == expected
    assert pickle.loads(pickle.dumps(ours)).encode(SENTENCES, allow=("[MASK]",)) == expected


@pytest.mark.parametrize("make", [bert, roberta, xlnet])
def test_without_leave_a_mask_is_plain_characters(make):
    tokenizer = Tokenizer(make())
    texts = [f"the {tokenizer.mask_token} sat."]
    before = tokenizer.encode(texts)
    assert tokenizer.mask_id not in before[0]
    assert tokenizer.mask_id in tokenizer.encode(texts, allow=("[MASK]",))[0]
    assert tokenizer.encode(texts) == before


def test_only_what_is_allowed_is_found():
    tokenizer = Tokenizer(roberta())
    (ids,) = tokenizer.encode(["the<s></s><mask><pad>"], allow=("<s>", "<mask>"))
    found = [id for id in ids if id in (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id, tokenizer.mask_id)]
    assert found == [tokenizer.begin_id, tokenizer.mask_id]
    assert tokenizer.decode([ids]) == ["the</s><pad>"]


@pytest.mark.parametrize(("make", "is_part"), [(lambda: xlnet("always", "▁a"), True), (xlnet, False), (roberta, False)])
def test_the_space_before_a_mask_is_masked_where_spaces_begin_words(make, is_part):
    """Also where the token itself does not say so, as in files that were made by hand."""
    content = make().to_str().replace('"lstrip":true', '"lstrip":false')
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(content))
    (spaced,), (joined,) = (tokenizer.encode([text], allow=("<mask>",)) for text in ("the <mask>", "the<mask>"))
    assert tokenizer.spaces_begin_words == is_part
    assert (spaced == joined) == is_part


def test_a_mask_that_is_in_the_vocabulary_alone_is_found():
    words = vocabulary("<pad>", "</s>", "<unk>", "the", "sat", "[MASK]")
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    ours = Tokenizer(tokenizer)
    assert ours.encode(["the [MASK] sat"]) == [[3, 2, 2, 2, 4]]
    assert ours.encode(["the [MASK] sat"], allow=("[MASK]",)) == [[3, 5, 4]]
    assert ours.vocab_size == 6


def test_a_token_that_there_is_not_cannot_be_allowed():
    tokenizer = Tokenizer.train(["the cat"] * 9, TokenizerConfig(vocab_size=60))
    assert tokenizer.mask_token is None and tokenizer.mask_id is None
    for name in ("[MASK]", "<|im_start|>"):
        with pytest.raises(UserError, match=r"allow='.*' is not a token of the tokenizer; name a special token of"):
            tokenizer.encode(["the cat"], allow=(name,))
