"""What a trained model is asked: the same answers in any batch and on any devices, in few shapes."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import ONE, write
from transformer_jax.data import BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import T5, Bert, BertConfig, T5Config, XLNet, XLNetConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import DenoisingConfig, MaskedLMConfig, PermutationLMConfig, Predictor

EIGHT = Strategy.choose()
BUCKETS, LENGTH = 3, 40
LETTERS = "abcdefgh"
RECORDS = [{"text": "\n".join(LETTERS[n % 5 :] * (1 + n % 3) for n in range(7))} for _ in range(4)]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "dtype": "float32", "max_length": LENGTH}
BATCHING = BatchingConfig(tokens=160, num_buckets=BUCKETS)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([record["text"] for record in RECORDS], TokenizerConfig(kind="characters", vocab_size=50))


@pytest.fixture(scope="module")
def bert(tokenizer):
    config = replace(BertConfig.base(tokenizer.vocab_size + 1, pad_id=tokenizer.pad_id), num_layers=1, **SIZES)
    model = jax.jit(lambda: Bert(config, rngs=nnx.Rngs(0)))()
    return MaskedLMConfig().build(tokenizer, config, BATCHING), model


@pytest.fixture(scope="module")
def t5(tokenizer):
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = replace(T5Config.small(tokenizer.vocab_size + 100, pad_id=tokenizer.pad_id), **layers, **SIZES)
    model = jax.jit(lambda: T5(config, rngs=nnx.Rngs(0)))()
    return DenoisingConfig().build(tokenizer, config, BATCHING), model


@pytest.fixture(scope="module")
def xlnet(tokenizer):
    config = replace(XLNetConfig.base(tokenizer.vocab_size, pad_id=tokenizer.pad_id), num_layers=1, **SIZES)
    model = jax.jit(lambda: XLNet(config, rngs=nnx.Rngs(0)))()
    return PermutationLMConfig().build(tokenizer, config, BATCHING), model


@contextmanager
def compilations():
    """Counts the programs that are compiled inside, operations that run on their own among them."""
    counts = Counter()

    def listen(event, duration, **details):
        counts["compiled"] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def ragged(gap, count=120):
    """Texts of all lengths, with one gap to three."""
    random = np.random.default_rng(0)
    texts = []
    for number in range(count):
        letters = [*random.choice(list(LETTERS), 1 + number % 30)]
        for which in range(1 + number % 3):
            letters.insert(min(3 * which, len(letters)), gap.format(which))
        texts.append("".join(letters))
    return texts


@pytest.mark.parametrize(("family", "gap"), [("bert", "[MASK]"), ("t5", "<extra_id_{}>")])
def test_ragged_texts_compile_once_per_bucket(request, family, gap):
    task, model = request.getfixturevalue(family)
    texts = ragged(gap)
    with compilations() as counts:
        whole = write(task, model, texts)
        assert 1 <= counts["compiled"] <= BUCKETS
        alone = [write(task, model, [text])[0] for text in texts[:40]]
        for first in (1, 7, 77):
            assert write(task, model, texts[first:]) == whole[first:]
        assert counts["compiled"] <= BUCKETS
    assert alone == whole[:40]
    assert write(task, model, []) == []


@pytest.mark.parametrize(("family", "gap"), [("bert", "[MASK]"), ("t5", "<extra_id_{}>")])
def test_all_devices_give_what_one_gives(request, family, gap):
    task, model = request.getfixturevalue(family)
    texts = ragged(gap, 50)
    assert write(task, EIGHT.replicate(model), texts, EIGHT) == write(task, model, texts)


def test_masks_are_filled_as_the_model_says_row_by_row(bert, tokenizer):
    task, model = bert
    for text in ragged("[MASK]", 12):
        (ids,) = task._masked([text])
        logits = np.asarray(model.masked_lm(model(np.array([ids]))))[0, :, : tokenizer.vocab_size]
        expected = [int(guess) if id == task.mask_id else id for id, guess in zip(ids, logits.argmax(-1), strict=True)]
        assert write(task, model, [text]) == tokenizer.decode([expected])


@pytest.mark.parametrize("family", ["bert", "t5", "xlnet"])
def test_samples_compile_once_on_any_devices_and_are_as_many_as_asked_for(request, family):
    task, model = request.getfixturevalue(family)
    with compilations() as counts:
        shown = task.samples(RECORDS, Predictor(task, model, ONE))
        assert counts["compiled"] <= 1
        assert task.samples(RECORDS, Predictor(task, model, ONE)) == shown
        assert len(task.samples(RECORDS[:2], Predictor(task, model, ONE))) == 2
        assert counts["compiled"] <= 1
    assert len(shown) == len(RECORDS) and all(sample["reference"] for sample in shown)
    assert task.samples(RECORDS, Predictor(task, EIGHT.replicate(model), EIGHT)) == shown
    assert task.samples([{"text": ""}], Predictor(task, model, ONE)) == []


@pytest.mark.parametrize(("family", "gap"), [("bert", "[MASK]"), ("t5", "<extra_id_{}>"), ("xlnet", "")])
def test_attention_compiles_once_per_bucket_and_leaves_out_padding(request, family, gap):
    task, model = request.getfixturevalue(family)
    texts = ragged(gap, 12)
    with compilations() as counts:
        found = [task.attention(text, Predictor(task, model, ONE)) for text in texts]
        few = counts["compiled"]
    for text, (_, maps) in zip(texts, found, strict=True):
        letters = [letter for letter in re.sub(r"<extra_id_\d>|\[MASK\]", "", text) if letter in LETTERS]
        assert [token for token in maps[0].keys if token in LETTERS] == letters
        for attended in maps:
            weights = np.asarray(attended.weights)
            assert weights.shape[2:] == (len(attended.queries), len(attended.keys))
            np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert few <= 2 * BUCKETS  # the text that is written, and the attention


def test_attention_is_that_of_the_text_alone(bert, xlnet, tokenizer):
    task, model = bert
    (ids,) = task._masked(["abc[MASK]de"])
    alone = np.asarray(model.attention(np.array([ids])))[:, 0]
    np.testing.assert_allclose(
        task.attention("abc[MASK]de", Predictor(task, model, ONE))[1][0].weights, alone, atol=1e-6
    )
    task, model = xlnet
    ids = [*tokenizer.encode(["abcde"])[0], tokenizer.end_id, tokenizer.begin_id]
    alone = np.asarray(model.attention(np.array([ids]), np.array([[0] * 6 + [2]])))[:, 0]
    np.testing.assert_allclose(task.attention("abcde", Predictor(task, model, ONE))[1][0].weights, alone, atol=1e-6)


def test_a_text_too_long_for_its_attention_is_named(bert):
    task, model = bert
    with pytest.raises(UserError, match="has 62 tokens; the model reads at most 40"):
        task.attention("a" * 60, Predictor(task, model, ONE))


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
def test_the_mask_may_be_typed_as_the_tokenizer_has_it(tokenizer, mask):
    named = Tokenizer.train([*LETTERS], TokenizerConfig(kind="characters", vocab_size=50))
    named._tokenizer.add_special_tokens([mask])
    config = replace(BertConfig.base(named.vocab_size, pad_id=named.pad_id), num_layers=1, **SIZES)
    task = MaskedLMConfig().build(named, config, BATCHING)
    assert task.mask_id == named.find(mask)
    assert task._masked([f"ab{mask}c"]) == task._masked(["ab[MASK]c"])
    assert task._masked(["ab[MASK]c"])[0].count(task.mask_id) == 1
    assert task.problems([f"ab{mask}c", "abc"]) == [None, f"has no {mask} to be filled"]
