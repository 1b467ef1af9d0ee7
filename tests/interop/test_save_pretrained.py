"""Models as checkpoints of transformers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.interop.checkpoints import assert_refused, assert_same_weights, loaded
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained, save_pretrained, weights
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import (
    BertConfig,
    GPTConfig,
    T5Config,
    TransformerConfig,
    XLNetConfig,
)

WRITTEN = {"config.json", "generation_config.json", "model.safetensors"}
EXPERTS = ExpertsConfig(4)
MARIAN = replace(TransformerConfig.base(), sinusoids="halved", norm_epsilon=1e-5, output_bias=True)
ROBERTA = replace(BertConfig.base(), position_start=2, pad_id=1, heads=("masked_lm",))
DISTILBERT = replace(BertConfig.base(), num_types=0, heads=("masked_lm",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(MARIAN, sinusoids="tensor2tensor"), "sinusoids='tensor2tensor' cannot be saved: .* has halved ones"),
        (replace(MARIAN, norm="pre", sinusoids="tensor2tensor"), "sinusoids='tensor2tensor' .* Pegasus, has halved"),
        (replace(MARIAN, norm="pre", tie_embeddings="none"), "tie_embeddings='none' cannot be saved: .* Pegasus"),
        (replace(MARIAN, norm_epsilon=1e-3), "norm_epsilon=0.001 cannot be saved: .* Marian, has norm_epsilon=1e-05"),
        (replace(XLNetConfig.base(), attention_dropout_rate=0.0), "attention_dropout_rate=0.0 cannot be saved"),
        (replace(MARIAN, positions="learned", sinusoids="interleaved"), "positions='learned'"),
        (replace(MARIAN, position_start=1), "position_start=1"),
        (replace(MARIAN, experts=EXPERTS), "experts=.* has experts=None"),
        (replace(BertConfig.base(), heads=("masked_lm", "span")), "heads=.* are those of no Bert architecture"),
        (replace(BertConfig.base(), heads=("pooler",), pooler_activation="relu"), "pooler_activation='relu'"),
        (replace(ROBERTA, pad_id=0), "position_start=2 cannot be saved: .* Roberta, has position_start=1"),
        (replace(ROBERTA, num_types=0), "num_types=0"),
        (replace(ROBERTA, heads=("pooler", "next_sentence")), "of no Roberta architecture"),
        (replace(DISTILBERT, norm_epsilon=1e-5), "norm_epsilon=1e-05"),
        (replace(DISTILBERT, heads=("pooler",), pooler_activation="relu"), "of no DistilBert architecture"),
        (replace(DISTILBERT, heads=("pooler", "classifier"), num_labels=2), "pooler_activation='tanh'"),
        (replace(DISTILBERT, heads=("pooler", "next_sentence"), pooler_activation="relu"), "of no DistilBert arch"),
        (replace(GPTConfig.small(), gated=True), "gated=True cannot be saved: .* GPT-2, has gated=False"),
        (replace(GPTConfig.small(), norm="rms"), "norm='rms'"),
        (replace(GPTConfig.small(), attention_bias=False), "attention_bias=False"),
        (replace(GPTConfig.small(), feed_forward_bias=False), "feed_forward_bias=False"),
        (replace(GPTConfig.small(), num_key_heads=4), "num_key_heads=4"),
        (replace(GPTConfig.small(), head_size=32), "size_of_head=32"),
        (replace(GPTConfig.small(), experts=EXPERTS), "experts="),
        (replace(GPTConfig.llama(), gated=False), "gated=False cannot be saved: .* Llama, has gated=True"),
        (replace(GPTConfig.llama(), norm="layer"), "norm='layer'"),
        (replace(GPTConfig.llama(), experts=EXPERTS), "experts="),
        (replace(T5Config.small(), experts=EXPERTS), "experts="),
        (replace(T5Config.small(), activation="gelu", gated=True), "activation='gelu' with gated=True has no name"),
    ],
)
def test_a_model_that_transformers_cannot_hold_is_not_saved(tmp_path, config, message):
    assert_refused(message, save_pretrained, SimpleNamespace(config=config), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "config",
    [
        MARIAN,
        replace(MARIAN, norm="pre", output_bias=False),
        ROBERTA,
        DISTILBERT,
        replace(BertConfig.base(), heads=("pooler", "masked_lm")),
        replace(GPTConfig.small(), num_key_heads=12, head_size=64),
        replace(GPTConfig.llama(), num_key_heads=4),
        T5Config.base().v1_1(d_ff=2048),
        replace(T5Config.small(), scale_output=False),
        XLNetConfig.base(),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_new_model_can_be_saved_and_loaded(tmp_path, config):
    """The smallest of this kind: one layer, and four features."""
    sizes = {"vocab_size": 9, "d_model": 4, "d_ff": 4, "num_heads": 2, "max_length": 8}
    sizes |= {"head_size": 2} if getattr(config, "head_size", None) else {}
    sizes |= {"num_key_heads": 2} if getattr(config, "num_key_heads", None) else {}
    sizes |= {field: 1 for field in vars(config) if field.startswith("num_") and field.endswith("_layers")}
    config = replace(config, **sizes)
    model = filled(config)
    save_pretrained(model, tmp_path)
    assert_same_weights(from_pretrained(tmp_path).model, model)


def filled(config):
    """A model with random weights, which are not drawn as its own would be: that takes longer to compile."""
    random, model = np.random.default_rng(0), jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), model)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_a_checkpoint_is_not_written_over(tmp_path):
    tokenizer = Tokenizer.train(["a b c"], TokenizerConfig(kind="characters"))
    save_pretrained(loaded("marian_shared").model, tmp_path, tokenizer=tokenizer)
    before = files(tmp_path)
    assert before.keys() == {*WRITTEN, "tokenizer.json", "tokenizer_config.json"}
    other = Tokenizer.train(["d e f"], TokenizerConfig(kind="characters"))
    with pytest.raises(UserError, match=r"already holds a model\.safetensors"):
        save_pretrained(loaded("gpt2_lm").model, tmp_path, tokenizer=other)
    assert files(tmp_path) == before


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(parts):
        raise OSError("no space left on device")

    monkeypatch.setattr(weights, "_joined", full)
    assert_refused("cannot be written to .*: no space left", save_pretrained, loaded("gpt2_lm").model, tmp_path / "new")
    assert files(tmp_path / "new") == {}


def test_a_config_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def stopped(path: Path, text: str, **_) -> None:
        path.write_bytes(text.encode()[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(loaded("gpt2_lm").model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}


def test_a_large_model_is_saved_in_several_files(tmp_path):
    save_pretrained(loaded("gpt2_lm").model, tmp_path, shard_bytes=2000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_same_weights(from_pretrained(tmp_path).model, loaded("gpt2_lm").model)
