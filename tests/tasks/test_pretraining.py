"""Masked, corrupted and permuted rows, as the models of BERT, T5 and XLNet get them."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import ONE, evaluate, store_of, write
from transformer_jax.data import Batches, BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.models import T5, Bert, BertConfig, T5Config, XLNetConfig
from transformer_jax.tasks import DenoisingConfig, MaskedLMConfig, PermutationLMConfig, Predictor

# Every document has letters of its own, so that the text of a row shows where it is from.
DOCUMENTS = [
    "\n".join("".join(letters[(i + j) % 4] for j in range(5 + i % 3)) for i in range(9))
    for letters in ("abcd", "efgh", "ijkl", "mnop")
]
RECORDS = [{"text": text} for text in DOCUMENTS]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "dtype": "float32"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(DOCUMENTS, TokenizerConfig(kind="characters", vocab_size=50))


def rng(position):
    return np.random.default_rng((7, position))


def rows(task, count=60):
    layout = task.layout(store_of(task, RECORDS), training=True)
    numbers = np.arange(count) % layout.buckets[0].num_rows
    return layout.rows(0, numbers, count, rng)


def masked(tokenizer, **settings):
    model = replace(BertConfig.base(tokenizer.vocab_size + 1, pad_id=tokenizer.pad_id), max_length=32, **SIZES)
    return MaskedLMConfig(**settings).build(tokenizer, model, BatchingConfig(rows=4))


def documents_of(tokenizer, ids):
    text = tokenizer.decode([ids])[0]
    return {number for number, document in enumerate(DOCUMENTS) if set(text) & set(document) - {"\n"}}


def unmasked(batch, row):
    ids = batch["ids"][row].copy()
    chosen = batch["weights"][row] > 0
    ids[batch["positions"][row][chosen]] = batch["labels"][row][chosen]
    return ids


def test_a_pair_is_next_if_and_only_if_its_texts_are_of_one_document(tokenizer):
    batch = rows(masked(tokenizer))
    for row in range(60):
        ids, types, valid = unmasked(batch, row), batch["types"][row], batch["valid"][row]
        first, second = (documents_of(tokenizer, ids[(types == kind) & valid]) for kind in (0, 1))
        assert len(first) == len(second) == 1
        assert (first == second) == (batch["pair"][row] == 0)  # 0 is "IsNext"
        assert ids[0] == tokenizer.begin_id and list(ids[valid]).count(tokenizer.end_id) == 2
    assert 15 < batch["pair"].sum() < 45


def test_the_share_of_a_row_that_is_predicted(tokenizer):
    task = masked(tokenizer, rate=0.25)
    batch = rows(task)
    for row in range(60):
        length = batch["valid"][row].sum()
        assert batch["weights"][row].sum() == min(task.max_predictions, max(1, round(0.25 * length)))
        special = np.isin(unmasked(batch, row), (tokenizer.begin_id, tokenizer.end_id))
        assert not special[batch["positions"][row][batch["weights"][row] > 0]].any()


def test_without_pairs_a_row_is_one_text(tokenizer):
    batch = rows(masked(tokenizer, next_sentence=False))
    for row in range(60):
        ids = unmasked(batch, row)
        assert len(documents_of(tokenizer, ids[batch["valid"][row]])) == 1
        assert list(ids).count(tokenizer.end_id) == 1 and not batch["types"][row].any()


def test_whole_words_are_masked_whole():
    texts = ["unbelievable houses\nreturning gardeners", "unbelievable gardeners returning\nhouses houses"] * 3
    settings = TokenizerConfig(kind="wordpiece", vocab_size=40)
    tokenizer = Tokenizer.train(texts, settings)
    task = masked(tokenizer, whole_words=True, rate=0.5)
    layout = task.layout(store_of(task, [{"text": text} for text in texts]), training=True)
    batch = layout.rows(0, np.arange(20) % layout.buckets[0].num_rows, 20, rng)
    continues = tokenizer.continues()
    assert continues.any() and not continues.all()
    for row in range(20):
        ids, chosen = unmasked(batch, row), np.zeros(task.max_length, bool)
        chosen[batch["positions"][row][batch["weights"][row] > 0]] = True
        for place in range(1, task.max_length):
            begins = ids[place - 1] in (tokenizer.begin_id, tokenizer.end_id)
            if batch["valid"][row, place] and continues[ids[place]] and not begins:
                assert chosen[place] == chosen[place - 1]


def test_the_mask_is_the_tokenizers_or_an_id_of_its_own(tokenizer):
    task = masked(tokenizer)
    assert task.mask_id == tokenizer.vocab_size and task.config.num_extra_ids(tokenizer) == 1
    named = Tokenizer.train([*DOCUMENTS, "[MASK]"], TokenizerConfig(kind="characters", vocab_size=50))
    named._tokenizer.add_special_tokens(["[MASK]"])
    assert MaskedLMConfig().num_extra_ids(named) == 0 and masked(named).mask_id == named.find("[MASK]")


def test_masks_are_filled_and_the_rest_is_left(tokenizer):
    task = masked(tokenizer)
    config = replace(
        BertConfig.base(tokenizer.vocab_size + 1, pad_id=tokenizer.pad_id), max_length=32, num_layers=1, **SIZES
    )
    model = jax.jit(lambda: Bert(config, rngs=nnx.Rngs(0)))()
    (filled,) = write(task, model, ["abc[MASK]d[MASK]"])
    assert re.fullmatch("abc.?d.?", filled, re.DOTALL)
    assert task.problems(["abc", "a[MASK]", "a" * 40 + "[MASK]"]) == [
        "has no [MASK] to be filled",
        None,
        "has 43 tokens; the model reads at most 32",
    ]


@pytest.mark.parametrize(("kind", "is_part"), [("wordpiece", True), ("characters", False)])
def test_a_space_before_a_mask_is_part_of_it_where_words_begin_with_one(kind, is_part):
    tokenizer = Tokenizer.train(["a bc a bc"] * 9, TokenizerConfig(kind=kind, vocab_size=300))
    task = masked(tokenizer)
    assert (task._masked(["bc [MASK] a"]) == task._masked(["bc[MASK] a"])) == is_part
    assert task._masked(["bc[MASK] a"]) != task._masked(["bc[MASK]a"])


def test_a_model_gets_the_heads_that_the_task_trains_and_no_others():
    model = replace(BertConfig.base(50), heads=("tagger",), num_labels=3)
    assert set(MaskedLMConfig().adapt(model, RECORDS).heads) == {"pooler", "masked_lm", "next_sentence"}
    assert set(MaskedLMConfig(next_sentence=False).adapt(model, RECORDS).heads) == {"masked_lm"}


def denoising(tokenizer, **settings):
    model = replace(T5Config.small(tokenizer.vocab_size + 100, pad_id=tokenizer.pad_id), max_length=32, **SIZES)
    return DenoisingConfig(**settings).build(tokenizer, model, BatchingConfig(rows=4))


def test_source_and_target_together_are_the_text(tokenizer):
    task = denoising(tokenizer)
    sentinels = task.sentinels
    assert sentinels[0] == tokenizer.vocab_size + 99 and list(sentinels) == sorted(sentinels, reverse=True)
    stream = np.concatenate([example["text"] for example in task.encode(RECORDS)])
    layout = task.layout(store_of(task, RECORDS), training=True)
    count = layout.buckets[0].num_rows
    batch = layout.rows(0, np.arange(count), count, rng)
    texts = []
    for source, target in zip(batch["source"].tolist(), batch["target"].tolist(), strict=True):
        assert target[0] == tokenizer.pad_id and target[1] == sentinels[0]
        spans, last = {}, None
        for id in target[1 : target.index(tokenizer.end_id)]:
            if id in sentinels:
                last = id
                spans[last] = []
            else:
                spans[last].append(id)
        for id in source[: source.index(tokenizer.end_id)]:
            texts += spans.pop(id) if id in sentinels else [id]
        assert not spans
    np.testing.assert_array_equal(texts, stream)
    assert (batch["source"][:-1] != tokenizer.pad_id).all()  # rows are full


class Constant(nnx.Module):
    """A model that takes every token for equally likely anywhere."""

    def __init__(self, values):
        self.values = nnx.Param(values)

    def hidden_and_balance(self, source, target, *, dropout_key=None):
        return jnp.zeros((*target.shape, 1)), jnp.zeros(())

    def logits(self, x):
        return jnp.broadcast_to(self.values[...], (*x.shape[:2], self.values.shape[0]))


def test_the_loss_of_the_text_leaves_out_sentinels_and_ends(tokenizer):
    task = denoising(tokenizer)
    logits = np.random.default_rng(0).normal(size=tokenizer.vocab_size + 100).astype(np.float32)
    metrics = evaluate(task, Constant(jnp.asarray(logits)), RECORDS)
    losses = np.log(np.exp(logits).sum()) - logits
    batches = Batches(task.layout(store_of(task, RECORDS), training=True)).once()
    labels = np.concatenate([batch["target"][:, 1:].ravel() for _, batch in batches])
    labels = labels[labels != tokenizer.pad_id]
    text = labels[~np.isin(labels, [*task.sentinels, tokenizer.end_id])]
    assert 0 < len(text) < len(labels)
    np.testing.assert_allclose(metrics["loss"], losses[labels].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["text_loss"], losses[text].mean(), rtol=1e-5)


def test_gaps_are_written_and_shown(tokenizer):
    task = denoising(tokenizer)
    (ids,) = task._sources(["ab<extra_id_0>cd<extra_id_1>"])
    assert ids == [*tokenizer.encode(["ab"])[0], task.sentinels[0], *tokenizer.encode(["cd"])[0], task.sentinels[1], 2]
    assert task._shown(ids[:-1]) == "ab<extra_id_0>cd<extra_id_1>"
    assert task.problems(["abc", "a<extra_id_0>"]) == ["has no gap <extra_id_0> to be filled", None]
    sizes = SIZES | {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = replace(T5Config.small(tokenizer.vocab_size + 100, pad_id=tokenizer.pad_id), max_length=32, **sizes)
    model = jax.jit(lambda: T5(config, rngs=nnx.Rngs(0)))()
    texts = ["ab<extra_id_0>cd", "<extra_id_0>"]
    assert write(task, model, texts) == [write(task, model, [text])[0] for text in texts]
    # What is written is attended to as it was written, not as its text would be read again.
    _, (cross, *_) = task.attention(texts[0], Predictor(task, model, ONE))
    (written,) = task._fill(texts[:1], Predictor(task, model, ONE))
    assert len(cross.queries) == len(written) + 1  # and its end


def test_too_few_sentinels_are_an_error_before_training(tokenizer):
    with pytest.raises(UserError, match="has 2 spans, but there are 1 sentinels"):
        denoising(tokenizer, num_sentinels=1)


def test_no_place_sees_its_own_token_and_padding_is_on_the_left(tokenizer):
    model = replace(XLNetConfig.base(tokenizer.vocab_size, pad_id=tokenizer.pad_id), max_length=32, **SIZES)
    task = PermutationLMConfig().build(tokenizer, model, BatchingConfig(rows=4))
    layout = task.layout(store_of(task, RECORDS), training=True)
    count = layout.buckets[0].num_rows
    batch = layout.rows(0, np.arange(count), count, rng)
    for row in range(count):
        places = batch["positions"][row][batch["weights"][row] > 0]
        assert len(places) >= 1 and len(set(places)) == len(places)
        np.testing.assert_array_equal(batch["ids"][row][places], batch["labels"][row][batch["weights"][row] > 0])
        assert not batch["allowed"][row][places, places].any()
        order = [{*np.flatnonzero(batch["allowed"][row][place])} & {*places} for place in places]
        assert sorted(map(len, order)) == list(range(len(places)))  # each sees those before it in one order
        assert list(batch["ids"][row][-2:]) == [tokenizer.end_id, tokenizer.begin_id]
        assert list(batch["types"][row][-2:]) == [0, 2]
    padding = batch["ids"][-1] == tokenizer.pad_id
    assert padding.any() and not padding[padding.argmin() :].any()
    assert len(places) < task.num_predict == 5


def test_the_loss_is_the_mean_over_masked_tokens_plus_the_mean_over_pairs(tokenizer):
    """However many tokens of a row are masked: each mean is over its own number."""
    task = masked(tokenizer, rate=0.3)
    config = replace(
        BertConfig.base(tokenizer.vocab_size + 1, pad_id=tokenizer.pad_id), max_length=32, num_layers=1, **SIZES
    )
    model = jax.jit(lambda: Bert(config, rngs=nnx.Rngs(0)))()
    tokens, pairs = [], []
    for _, batch in Batches(task.layout(store_of(task, RECORDS), training=False)).once():
        hidden = model(batch["ids"], batch["types"], valid=batch["valid"])
        by_token = np.asarray(jax.nn.log_softmax(model.masked_lm(hidden)))
        by_pair = np.asarray(jax.nn.log_softmax(model.next_sentence(hidden)))
        for row in np.flatnonzero(batch["valid"].any(axis=1)):
            chosen = batch["weights"][row] > 0
            found = zip(batch["positions"][row][chosen], batch["labels"][row][chosen], strict=True)
            tokens.append([-by_token[row, position, label] for position, label in found])
            pairs.append(-by_pair[row, batch["pair"][row]])
    assert len({len(row) for row in tokens}) > 1
    metrics = evaluate(task, model, RECORDS)
    assert metrics["masked_lm_loss"] == pytest.approx(np.mean(np.concatenate(tokens)), rel=1e-5)
    assert metrics["next_sentence_loss"] == pytest.approx(np.mean(pairs), rel=1e-5)
    assert metrics["loss"] == pytest.approx(metrics["masked_lm_loss"] + metrics["next_sentence_loss"], rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["masked_lm_loss"]), rel=1e-5)
