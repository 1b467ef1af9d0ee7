"""Every loss over a vocabulary is the same in chunks: its terms and its gradients."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tasks.running import store_of
from transformer_jax.data import Batches, BatchingConfig, Tokenizer, TokenizerConfig
from transformer_jax.functional import losses
from transformer_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig, XLNetConfig
from transformer_jax.tasks import (
    CausalLMConfig,
    DenoisingConfig,
    LossTerm,
    MaskedLMConfig,
    PermutationLMConfig,
    TranslationConfig,
)
from transformer_jax.tasks.task import loss_terms

TEXTS = ["abcd efgh\nijkl mnop\nabba cdef", "ponm\nlkji abc\nhgfe dcba mno"]
TEXT_RECORDS = [{"text": text} for text in TEXTS]
PAIR_RECORDS = [{"source": "abcd", "target": "dcba"}, {"source": "efghij", "target": "jihgfe"}]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "dtype": "float32"}
ENCODER_DECODER = SIZES | {"num_encoder_layers": 1, "num_decoder_layers": 1}

CASES = {
    "translation": (TranslationConfig(), TransformerConfig, "base", ENCODER_DECODER, PAIR_RECORDS),
    "causal_lm": (CausalLMConfig(), GPTConfig, "small", SIZES | {"num_layers": 1}, TEXT_RECORDS),
    "masked_lm": (MaskedLMConfig(rate=0.3), BertConfig, "base", SIZES | {"num_layers": 1}, TEXT_RECORDS),
    "denoising": (DenoisingConfig(), T5Config, "small", ENCODER_DECODER, TEXT_RECORDS),
    "permutation_lm": (PermutationLMConfig(), XLNetConfig, "base", SIZES | {"num_layers": 1}, TEXT_RECORDS),
}


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in CASES), ("translation", False)])
def test_a_loss_in_chunks_is_the_loss(monkeypatch, name, training):
    task_config, model_type, size, sizes, records = CASES[name]
    tokenizer = Tokenizer.train(TEXTS, TokenizerConfig(kind="characters", vocab_size=50))
    pad = {} if model_type is GPTConfig else {"pad_id": tokenizer.pad_id}
    # Room for a mask and for sentinels after the ids of the tokenizer.
    config = replace(getattr(model_type, size)(tokenizer.vocab_size + 100, **pad), max_length=16, **sizes)
    config = task_config.adapt(config, records)
    task = task_config.build(tokenizer, config, BatchingConfig(rows=2))
    model = jax.jit(lambda: config.build(nnx.Rngs(0)))()
    batch = Batches(task.layout(store_of(task, records), training=True))[0]
    key = jax.random.split(jax.random.key(0), len(jax.tree.leaves(batch)[0])) if training else None

    def totals(model):
        terms = loss_terms(task.loss(model, batch, key))
        return sum(term.total * term.factor for term in terms.values()), terms

    def run():
        program = str(jax.make_jaxpr(lambda model: totals(model)[1])(model))
        return program.count("scan["), jax.jit(jax.value_and_grad(totals, has_aux=True))(model)

    num_scans, whole = run()
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 300)
    num_scans_in_chunks, chunked = run()
    assert num_scans_in_chunks == num_scans + 1
    assert all(isinstance(term, LossTerm) and term.weight > 0 for term in chunked[0][1].values())
    for a, b in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
