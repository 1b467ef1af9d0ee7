"""A Transformer that was trained here is a Marian or a Pegasus to transformers: the same logits and translations."""

import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.decoding import greedy
from transformer_jax.interop import SpecialIds, from_pretrained, save_pretrained
from transformer_jax.models import Transformer, TransformerConfig

TINY = replace(
    TransformerConfig.base(vocab_size=21),
    d_model=12,
    num_heads=3,
    d_ff=10,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_length=16,
    norm_epsilon=1e-5,
)
DATES = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "dates.py"))["config"].model
CONFIGS = {
    "post": TINY,
    "pre": replace(TINY, norm="pre"),
    "halved": replace(TINY, norm="pre", sinusoids="halved"),
    "biased": replace(TINY, output_bias=True, activation="gelu", scale_embedding=False),
    "other_decoder": replace(TINY, norm="pre", decoder_num_heads=4, decoder_d_ff=7, output_bias=True),
    "target": replace(TINY, tie_embeddings="target", source_vocab_size=33),
    "untied": replace(TINY, tie_embeddings="none", decoder_num_heads=2),
    "dates": replace(DATES, vocab_size=60, pad_id=0),
}
IDS = SpecialIds(begin=1, end=(2,), pad=0, decoder_start=1)
SOURCE = np.array([[5, 6, 7, 8, 9, 2], [10, 11, 12, 2, 0, 0]])
TARGET = np.array([[1, 4, 3, 9, 14], [1, 20, 19, 7, 0]])

each_config = pytest.mark.parametrize("name", CONFIGS)
logits = jax.jit(Transformer.__call__)


def made(name: str) -> Transformer:
    """A model in which every weight matters: no bias or norm is left at 0 or 1."""
    model, random = Transformer(CONFIGS[name], rngs=nnx.Rngs(0)), np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + 0.3 * jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), model)


def save(model: Transformer, folder: Path) -> None:
    if model.config.norm_epsilon == 1e-5:
        save_pretrained(model, folder, special_ids=IDS)
    else:
        with pytest.warns(UserWarning, match="norm_epsilon=1e-06 is saved as 1e-05, the only one"):
            save_pretrained(model, folder, special_ids=IDS)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


@each_config
def test_it_comes_back_with_the_same_logits(tmp_path, name):
    model = made(name)
    save(model, tmp_path)
    again = from_pretrained(tmp_path)
    assert again.config == replace(model.config, sinusoids="halved", norm_epsilon=1e-5)
    assert again.special_ids == IDS
    assert_same(logits(again.model, SOURCE, TARGET), logits(model, SOURCE, TARGET))


@each_config
def test_transformers_computes_the_same_logits_and_the_same_translation(tmp_path, name, transformers):
    import torch

    model = made(name)
    save(model, tmp_path)
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not {kind: names for kind, names in report.items() if names}
    source, target = torch.from_numpy(SOURCE), torch.from_numpy(TARGET)
    with torch.no_grad():
        found = theirs.eval()(source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits.numpy()
        words = theirs.generate(source, attention_mask=(source != 0).long(), do_sample=False, num_beams=1)
    assert_same(found, np.asarray(logits(model, SOURCE, TARGET)))
    length = model.config.max_length - 1
    state = jax.jit(Transformer.start, static_argnums=2)(model, SOURCE, length)
    ours = greedy(model.decode, state, jnp.full((2, 1), 1), length=length, end_id=2)
    for row, translation in enumerate(words.numpy()):
        end = int(ours.lengths[row])
        assert translation[1 : end + 1].tolist() == ours.tokens[row, :end].tolist()
        assert end > 1


@each_config
def test_what_transformers_saves_again_is_the_same(tmp_path, name, transformers):
    model = made(name)
    save(model, tmp_path / "ours")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again = from_pretrained(tmp_path / "theirs")
    assert again.special_ids == IDS
    assert_same(logits(again.model, SOURCE, TARGET), logits(model, SOURCE, TARGET))
