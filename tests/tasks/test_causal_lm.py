import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.data import BatchingConfig, Store, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.functional import log_softmax
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.parallel import Strategy
from transformer_jax.tasks import CausalLMConfig

ONE = Strategy(1, None)
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


def make(tokenizer, model, **settings):
    return CausalLMConfig(**settings).build(tokenizer, model.config, BatchingConfig(rows=3))


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
        for place in range(1, len(chunk)):
            context = [id for document, id in chunk[:place] if document == chunk[place][0]]
            if context:
                total, count = total - score(model, context, chunk[place][1]), count + 1
    figures = make(tokenizer, model).evaluate(model, RECORDS, ONE)
    assert figures["loss"] == pytest.approx(total / count, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(total / math.log(2) / sum(map(len, TEXTS)), rel=1e-5)


def test_a_stream_has_no_boundaries(tokenizer, model):
    ids = [id for text in tokenizer.encode(TEXTS) for id in text]
    total = 0
    for start in range(0, len(ids) - 1, LENGTH):
        chunk = ids[start : start + LENGTH + 1]
        total -= sum(score(model, chunk[:place], chunk[place]) for place in range(1, len(chunk)))
    figures = make(tokenizer, model, separate=False).evaluate(model, RECORDS, ONE)
    assert figures["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_bits_are_per_byte_and_per_character_and_left_out_where_a_token_is_unknown(tokenizer, model):
    task = make(tokenizer, model)
    assert "bits_per_byte" not in task.evaluate(model, [{"text": "ab€"}], ONE)
    wide = Tokenizer.train(["ab€"], TokenizerConfig(kind="characters", vocab_size=50))
    figures = make(wide, model).evaluate(model, [{"text": "ab€"}], ONE)
    assert figures["bits_per_character"] == pytest.approx(figures["bits_per_byte"] * 5 / 3)


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
    assert task.complete(model, texts, ONE) == expected
    assert task.complete(model, texts[1:2], ONE) == expected[1:2]


def test_a_long_continuation_goes_on_from_the_last_of_it(tokenizer, model):
    task = make(tokenizer, model, separate=False, temperature=1.0, new_tokens=40, seed=7)
    (long,) = task._continue(model, [tokenizer.encode(["abcabcabcabcabc"])[0]], first=0)
    assert LENGTH < len(long) <= 40 and tokenizer.end_id not in long
    (prompt,) = tokenizer.encode(["abcabcabcabcabc"])
    by_hand = []
    for count in (4, 4, 3):  # half a length at a time, each after the last that leaves room for it
        by_hand += greedy_by_hand(model, tokenizer, [*prompt, *by_hand][-(LENGTH - count) :], count)
    rounds = replace(task, config=replace(task.config, temperature=0, new_tokens=11))
    assert rounds._continue(model, [prompt], first=0) == [by_hand]
    (again,) = task._continue(model, [tokenizer.encode(["abcabcabcabcabc"])[0]], first=0)
    assert long == again
    (other,) = replace(task, config=replace(task.config, seed=2))._continue(
        model, [tokenizer.encode(["abcabcabcabcabc"])[0]], first=0
    )
    assert long != other
    few = replace(task, config=replace(task.config, temperature=0, new_tokens=2))
    assert few.complete(model, ["abcabcabcabcabc"], ONE) == few.complete(model, ["zz" * 9 + "abcabc"], ONE)
    assert few.complete(model, ["cacacaca"], ONE) != few.complete(model, ["abcabcabcabcabc"], ONE)


def test_nothing_cannot_be_continued(tokenizer, model):
    assert make(tokenizer, model, separate=False).faults(["a", ""]) == [None, "is empty"]
    assert make(tokenizer, model).faults([""]) == [None]  # it is begun
    with pytest.raises(UserError, match="text 1 is empty"):
        make(tokenizer, model, separate=False).complete(model, ["a", ""], ONE)


def test_every_token_is_predicted_once(tokenizer, model):
    task = make(tokenizer, model)
    examples = task.encode(RECORDS)
    layout = task.layout(Store.of(examples))
    batch = layout.rows(0, np.arange(layout.buckets[0].num_rows), 9, None)
    assert float(task.loss(model, batch, None)[1]) == sum(len(example["text"]) - 1 for example in examples)
    whole = replace(task, max_length=64).layout(Store.of(examples)).rows(0, np.arange(1), 1, None)
    wide = replace(model.config, max_length=64)
    assert float(task.loss(GPT(wide, rngs=nnx.Rngs(0)), whole, None)[1]) == sum(len(e["text"]) - 1 for e in examples)
