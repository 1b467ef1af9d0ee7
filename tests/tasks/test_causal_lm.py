import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import evaluate, store_of, write
from transformer_jax.data import BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.functional import log_softmax
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.tasks import CausalLMConfig, SamplingConfig

TEXTS = ["abcab", "ba", "ccabca bb"]
RECORDS = [{"text": text} for text in TEXTS]
LENGTH = 8


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, TokenizerConfig(kind="characters", vocab_size=50))


@pytest.fixture(scope="module")
def model(tokenizer):
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 2, "max_length": LENGTH, "dtype": "float32"}
    config = replace(GPTConfig.small(tokenizer.vocab_size), **sizes)
    return jax.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()


def make(tokenizer, model, *, separate=True, **decoding):
    config = CausalLMConfig(separate=separate, decoding=SamplingConfig(**decoding))
    return config.build(tokenizer, model.config, BatchingConfig(rows=3))


def score(model, context, token):
    """The logarithm of a token's probability after its context, one position at a time."""
    return float(log_softmax(model(jnp.array([context])))[0, -1, token])


def test_documents_are_scored_as_if_they_were_alone(tokenizer, model):
    total = count = 0
    stream, rows = [], []
    for ids in tokenizer.encode(TEXTS):
        stream += [(len(rows), id) for id in (tokenizer.begin_id, *ids, tokenizer.end_id)]
        rows.append(ids)
    for start in range(0, len(stream) - 1, LENGTH):  # a row sees no further back than where it begins
        chunk = stream[start : start + LENGTH + 1]
        for position in range(1, len(chunk)):
            context = [id for document, id in chunk[:position] if document == chunk[position][0]]
            if context:
                total, count = total - score(model, context, chunk[position][1]), count + 1
    metrics = evaluate(make(tokenizer, model), model, RECORDS)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / sum(map(len, TEXTS)), rel=1e-5)


def test_a_stream_has_no_boundaries(tokenizer, model):
    ids = [id for text in tokenizer.encode(TEXTS) for id in text]
    total = 0
    for start in range(0, len(ids) - 1, LENGTH):
        chunk = ids[start : start + LENGTH + 1]
        total -= sum(score(model, chunk[:position], chunk[position]) for position in range(1, len(chunk)))
    metrics = evaluate(make(tokenizer, model, separate=False), model, RECORDS)
    assert metrics["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_bits_are_per_byte_and_per_character_and_left_out_where_a_token_is_unknown(tokenizer, model):
    task = make(tokenizer, model)
    assert "bits_per_byte" not in evaluate(task, model, [{"text": "ab€"}])
    wide = Tokenizer.train(["ab€"], TokenizerConfig(kind="characters", vocab_size=50))
    metrics = evaluate(make(wide, model), model, [{"text": "ab€"}])
    assert metrics["bits_per_character"] == pytest.approx(metrics["bits_per_byte"] * 5 / 3)


def greedy_by_hand(model, tokenizer, prompt, count):
    """Token by token with the whole text, for as long as it fits."""
    ids, written = list(prompt), []
    while len(written) < count:
        token = int(jnp.argmax(model(jnp.array([ids]))[0, -1]))
        if token == tokenizer.end_id:
            break
        ids, written = [*ids, token], [*written, token]
    return written


@pytest.mark.parametrize("separate", [True, False])
def test_the_likeliest_continuation_is_that_of_the_whole_text(tokenizer, model, separate):
    task = make(tokenizer, model, separate=separate, temperature=0, new_tokens=3)
    texts = ["a", "bca", "cc"]
    expected = [
        tokenizer.decode([greedy_by_hand(model, tokenizer, [*([tokenizer.begin_id] if separate else []), *ids], 3)])[0]
        for ids in tokenizer.encode(texts)
    ]
    assert write(task, model, texts) == expected
    assert write(task, model, texts[1:2]) == expected[1:2]


def decoding(task, **changes):
    return replace(task, config=replace(task.config, decoding=replace(task.config.decoding, **changes)))


def test_a_long_continuation_goes_on_from_the_last_of_it(tokenizer, model):
    text = "abcabcabcabcabc"
    task = make(tokenizer, model, separate=False, temperature=1.0, new_tokens=40, seed=10)
    (long,) = write(task, model, [text])
    assert LENGTH < len(long) <= 40
    (prompt,) = tokenizer.encode([text])
    by_hand = []
    for count in (4, 4, 3):  # half a length at a time, each after the last that leaves room for it
        by_hand += greedy_by_hand(model, tokenizer, [*prompt, *by_hand][-(LENGTH - count) :], count)
    turns = decoding(task, temperature=0, new_tokens=11)
    assert len(by_hand) == 11 and write(turns, model, [text]) == tokenizer.decode([by_hand])
    assert write(task, model, [text]) == [long]
    assert write(decoding(task, seed=2), model, [text]) != [long]
    few = decoding(task, temperature=0, new_tokens=2)
    assert write(few, model, [text]) == write(few, model, ["zz" * 9 + "abcabc"])
    assert write(few, model, ["cacacaca"]) != write(few, model, [text])


def test_nothing_cannot_be_continued(tokenizer, model):
    assert make(tokenizer, model, separate=False).problems(["a", ""]) == [None, "is empty"]
    assert make(tokenizer, model).problems([""]) == [None]  # it is begun
    with pytest.raises(UserError, match="text 1 is empty"):
        write(make(tokenizer, model, separate=False), model, ["a", ""])


def test_every_token_is_predicted_once(tokenizer, model):
    task = make(tokenizer, model)
    examples = task.encode(RECORDS)
    layout = task.layout(store_of(task, RECORDS), training=True)
    batch = layout.rows(0, np.arange(layout.buckets[0].num_rows), 9, None)
    assert float(task.loss(model, batch, None)[1]) == sum(len(example["text"]) - 1 for example in examples)
    whole = replace(task, max_length=64).layout(store_of(task, RECORDS), training=True).rows(0, np.arange(1), 1, None)
    wide = replace(model.config, max_length=64)
    assert float(task.loss(GPT(wide, rngs=nnx.Rngs(0)), whole, None)[1]) == sum(len(e["text"]) - 1 for e in examples)
