"""Every token of a corpus is in a row of every epoch, whatever its lines and documents are like."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.data import Batches, BatchingConfig, Store, Tokenizer, TokenizerConfig
from transformer_jax.data.columns import Column
from transformer_jax.models import BertConfig, GPTConfig, T5Config, XLNetConfig
from transformer_jax.tasks import CausalLMConfig, DenoisingConfig, MaskedLMConfig, PermutationLMConfig

FIRST = 1000  # ids of the corpus count up from here, so that each token is known again wherever it comes
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "dtype": "float32"}

CORPORA = {  # the lengths of the lines of each document
    "long lines": [[1000]] * 5,
    "one long line": [[3000]],
    "short lines": [[3, 1, 7, 2, 5] * 9] * 6,
    "a line to a document": [[n] for n in range(1, 90)],
    "lines about as long as a row": [[60, 61, 62, 63, 64, 65, 66], [59, 30, 31, 32, 58, 1, 63]],
    "single tokens": [[1]] * 7 + [[1] * 200],
    "mixed": [[5, 400, 1, 1, 64, 63, 62, 7], [1], [200], [9] * 30, [2, 2]],
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a text"], TokenizerConfig(kind="characters", vocab_size=50))


def corpus(documents, *, sentences):
    """Documents of lines of these lengths, encoded: each line by itself with an empty one last, or all in one."""
    lines, count = [], FIRST
    for document in documents:
        ends = count + np.cumsum(document)
        texts = [list(range(end - length, end)) for length, end in zip(document, ends, strict=True)]
        lines += (
            [{"text": text} for text in (*texts, [])] if sentences else [{"text": list(range(count, int(ends[-1])))}]
        )
        count = int(ends[-1])
    return Store.of(lines, {"text": Column()}), range(FIRST, count)


def masked_lm(tokenizer, length, **settings):
    model = replace(BertConfig.base(50, pad_id=tokenizer.pad_id), max_length=length, **SIZES)
    return MaskedLMConfig(**settings).build(tokenizer, model, BatchingConfig(rows=4))


def epoch(layout, number, *, seed=0):
    batches = Batches(layout, seed=seed)
    return [batches[number * batches.per_epoch + index] for index in range(batches.per_epoch)]


def unmasked(batch):
    ids = batch["ids"].copy()
    for row, (positions, labels, weights) in enumerate(
        zip(batch["positions"], batch["labels"], batch["weights"], strict=True)
    ):
        ids[row, positions[weights > 0]] = labels[weights > 0]
    return ids


def seen(*arrays):
    return Counter(int(id) for array in arrays for id in array.ravel() if id >= FIRST)


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA)
@pytest.mark.parametrize("length", [8, 16, 64])
def test_masked_texts_have_every_token_once(tokenizer, documents, length):
    store, tokens = corpus(documents, sentences=True)
    layout = masked_lm(tokenizer, length, next_sentence=False).layout(store, training=True)
    for number in range(2):
        assert seen(*map(unmasked, epoch(layout, number))) == Counter(tokens)


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA)
@pytest.mark.parametrize("length", [8, 16, 64])
def test_masked_pairs_have_every_token(tokenizer, documents, length):
    store, tokens = corpus(documents, sentences=True)
    layout = masked_lm(tokenizer, length).layout(store, training=True)
    for number in range(3):
        assert set(seen(*map(unmasked, epoch(layout, number, seed=length)))) == set(tokens)
    assert set(seen(*(unmasked(batch) for _, batch in Batches(layout).once()))) == set(tokens)


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA)
@pytest.mark.parametrize("length", [16, 64])
def test_spans_and_what_is_around_them_are_every_token_once(tokenizer, documents, length):
    store, tokens = corpus(documents, sentences=False)
    model = replace(T5Config.small(FIRST, pad_id=tokenizer.pad_id), max_length=length, **SIZES)
    layout = DenoisingConfig().build(tokenizer, model, BatchingConfig(rows=4)).layout(store, training=True)
    assert seen(*(batch[name] for batch in epoch(layout, 1) for name in ("source", "target"))) == Counter(tokens)


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA)
@pytest.mark.parametrize("length", [8, 64])
def test_permuted_texts_have_every_token_once(tokenizer, documents, length):
    store, tokens = corpus(documents, sentences=False)
    model = replace(XLNetConfig.base(50, pad_id=tokenizer.pad_id), max_length=length, **SIZES)
    layout = PermutationLMConfig().build(tokenizer, model, BatchingConfig(rows=4)).layout(store, training=True)
    assert seen(*(batch["ids"] for batch in epoch(layout, 1))) == Counter(tokens)


@pytest.mark.parametrize("documents", CORPORA.values(), ids=CORPORA)
@pytest.mark.parametrize("length", [1, 8, 64])
def test_a_language_model_predicts_every_token_but_the_first_once(tokenizer, documents, length):
    store, tokens = corpus(documents, sentences=False)
    model = replace(GPTConfig.small(50), max_length=length, d_model=16, num_heads=2, d_ff=24, dtype="float32")
    layout = CausalLMConfig(separate=False).build(tokenizer, model, BatchingConfig(rows=4)).layout(store, training=True)
    assert seen(*(batch["text"][:, 1:] for batch in epoch(layout, 1))) == Counter(tokens[1:])


@pytest.mark.parametrize("documents", [CORPORA["long lines"], CORPORA["short lines"], [[20, 20]] * 30])
def test_about_half_the_pairs_go_on_in_the_middle_of_a_long_line_too(tokenizer, documents):
    layout = masked_lm(tokenizer, 64).layout(corpus(documents, sentences=True)[0], training=True)
    labels = [batch["pair"][batch["weights"].any(axis=1)] for number in range(10) for batch in epoch(layout, number)]
    assert 0.4 < 1 - np.concatenate(labels).mean() < 0.6
    assert len({tuple(np.sort(label)) for label in labels}) > 1


def test_a_pair_that_goes_on_does_so_token_by_token_and_fills_its_row(tokenizer):
    store, _ = corpus(CORPORA["mixed"], sentences=True)
    document_of = np.repeat(np.arange(5), [sum(document) for document in CORPORA["mixed"]])
    layout = masked_lm(tokenizer, 64).layout(store, training=True)
    full = {0: [], 1: []}
    for batch in (batch for number in range(20) for batch in epoch(layout, number)):
        ids = unmasked(batch)
        for row in np.flatnonzero(batch["weights"].any(axis=1)):
            is_text = ids[row] >= FIRST
            first, second = (ids[row][is_text & (batch["types"][row] == kind)] for kind in (0, 1))
            assert len(first) and len(second)
            for text in (first, second):
                assert (np.diff(text) == 1).all() and len(set(document_of[text - FIRST])) == 1
            goes_on = second[0] == first[-1] + 1 and document_of[first[-1] - FIRST] == document_of[second[0] - FIRST]
            assert goes_on == (batch["pair"][row] == 0)
            full[int(batch["pair"][row])].append(batch["valid"][row].all())
    # Rows are short at the end of a document, and one in ten on purpose. The label must not show in the length.
    assert min(map(np.mean, full.values())) > 0.5 and abs(np.mean(full[0]) - np.mean(full[1])) < 0.15


def test_whole_sentences_are_kept_where_they_fit(tokenizer):
    documents = CORPORA["short lines"]
    store, _ = corpus(documents, sentences=True)
    ends = {FIRST + int(end) for end in np.cumsum([length for document in documents for length in document])}
    for settings in ({}, {"next_sentence": False}):
        layout = masked_lm(tokenizer, 64, **settings).layout(store, training=True)
        for batch in epoch(layout, 0):
            ids = unmasked(batch)
            for row in np.flatnonzero(batch["weights"].any(axis=1)):
                first = ids[row][(ids[row] >= FIRST) & (batch["types"][row] == 0)]
                assert first[-1] + 1 in ends and first[0] in ends | {FIRST}
