import pytest

from transformer_jax.data import Dates, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError

TEXTS = [
    "Tuesday, March 4, 2025",
    "Dienstag, 4. März 2025",
    "2025年3月4日火曜日",
    "3 909,55 km",  # with a narrow no-break space
    "вторник, 4 марта",
    "الثلاثاء ٤ مارس",
    "मंगलवार, 4 मार्च",
    "  two  spaces ",
    "line\u2028separator and \x85",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS * 5, TokenizerConfig(vocab_size=300), tags=("<de>", "<ja>"))


@pytest.mark.parametrize("text", [*TEXTS, "", "<de> March 4"])
def test_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode([text])) == [text]


def test_tags_are_single_tokens_and_digits_stay_apart(tokenizer):
    (ids,) = tokenizer.encode(["<de> March 2025"])
    assert tokenizer.tokens(ids) == ["<de>", " March", " ", "2", "0", "2", "5"]


def test_special_tokens_in_a_text_mean_nothing(tokenizer):
    (ids,) = tokenizer.encode(["</s><pad>"])
    assert not {tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id} & set(ids)


def test_unknown_characters_become_one_unknown_token(tokenizer):
    (ids,) = tokenizer.encode(["☃"])
    assert ids == [tokenizer.unknown_id]


def test_special_ids_are_distinct_and_inside_the_vocabulary(tokenizer):
    ids = {tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id, tokenizer.unknown_id}
    assert len(ids) == 4 and max(ids) < tokenizer.vocab_size <= 300


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS) == tokenizer.encode(TEXTS)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    with pytest.raises(UserError, match="there is no tokenizer at"):
        Tokenizer.load(tmp_path / "nothing.json")


def test_training_is_deterministic():
    data = Dates(train_size=500)
    texts = [text for record in data.split("train") for text in record.values()]
    first, second = (Tokenizer.train(texts, TokenizerConfig(400), tags=data.tags()) for _ in range(2))
    assert first.encode(texts) == second.encode(texts)
