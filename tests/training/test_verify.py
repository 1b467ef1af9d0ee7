"""The law of parallelism, for every model; and that whatever breaks it is found."""

from dataclasses import replace
from itertools import pairwise

import jax
import pytest

from transformer_jax.data import BatchingConfig, Dates, Records, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.functional import dropout
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig, XLNetConfig
from transformer_jax.parallel import MeshConfig, verify
from transformer_jax.tasks import (
    CausalLMConfig,
    DenoisingConfig,
    MaskedLMConfig,
    PermutationLMConfig,
    TranslationConfig,
)
from transformer_jax.training import Config, OptimizerConfig
from transformer_jax.training.verify import Outcome, _compare, _default_meshes, _ways

SENTENCES = [f"The house {n} has {'many ' * (n % 7)}doors and {n * n} windows." for n in range(60)]
TEXTS = Records(train=tuple({"text": f"{a}\n{b}"} for a, b in pairwise(SENTENCES)))
SIZES = {"d_model": 16, "num_heads": 4, "d_ff": 32, "max_length": 32, "dtype": "float32"}
PAIR = {**SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}
STACK = {**SIZES, "num_layers": 2}
MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, MeshConfig(data=2, sequence=2, tensor=2)]


def config_of(model, task, data=TEXTS, **settings):
    return Config(
        model=model,
        data=data,
        task=task,
        processor=TokenizerConfig(vocab_size=300),
        batching=BatchingConfig(rows=16, num_buckets=1),
        optimizer=OptimizerConfig(schedule="linear", peak=1e-3, warmup_steps=2, total_steps=10),
        steps=2,
        **settings,
    )


TRANSFORMER = config_of(
    replace(TransformerConfig.base(304, pad_id=None), **PAIR),
    TranslationConfig(),
    Dates(train_size=120, languages=("de", "ja")),
)
TRANSFORMER = replace(TRANSFORMER, batching=BatchingConfig(tokens=512, pack_length=32))
CONFIGS = {
    "transformer": TRANSFORMER,
    "experts": replace(
        TRANSFORMER, model=replace(TRANSFORMER.model, num_decoder_layers=1, experts=ExpertsConfig(num_experts=4))
    ),
    "bert": config_of(replace(BertConfig.base(304, pad_id=None), **STACK), MaskedLMConfig()),
    "gpt": config_of(replace(GPTConfig.small(304), **STACK, num_key_heads=2), CausalLMConfig()),
    "t5": config_of(replace(T5Config.small(312, pad_id=None), **PAIR, head_size=4), DenoisingConfig()),
    "xlnet": config_of(replace(XLNetConfig.base(304), **STACK, pad_id=None), PermutationLMConfig()),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_gives_the_same_numbers_however_it_is_divided(name):
    meshes = [*MESHES, {"data": 2, "expert": 4}] if name == "experts" else MESHES
    checks = {check.name: check for check in verify(CONFIGS[name], meshes)}
    failed = {name: check for name, check in checks.items() if not check.passed}
    assert not failed
    done = [name for name, check in checks.items() if not check.skipped]
    assert {"jit, data=2 fsdp=2 tensor=2", "jit, data=2 sequence=2 tensor=2", "2 micro-batches, data=8"} <= {*done}
    assert "resumed from a checkpoint" in done
    assert ("packed or not" in done) == (name in ("transformer", "experts"))


def test_pmap_and_all_kinds_of_meshes_are_compared_by_default():
    names = [name for name, _ in _ways(None, _default_meshes(TRANSFORMER), False)]
    assert {"pmap, data=8", "jit, fsdp=8", "jit, tensor=2", "jit, sequence=4", "2 micro-batches, data=8"} <= {*names}
    assert not any("expert" in name for name in names)
    assert any("expert=4" in name for name, _ in _ways(None, _default_meshes(CONFIGS["experts"]), False))


def test_dropout_that_depends_on_the_division_is_found(monkeypatch):
    """With one key for a whole micro-batch, its rows would have other noise than in the whole batch."""

    def of_the_first_row(x, rate, key):
        return dropout(x, rate, key if key is None or not key.ndim else jax.numpy.broadcast_to(key[:1], key.shape))

    monkeypatch.setattr("transformer_jax.models.gpt.dropout", of_the_first_row)
    checks = {check.name: check for check in verify(CONFIGS["gpt"], [], steps=1)}
    assert not checks["4 micro-batches on one device"].passed
    assert checks["resumed from a checkpoint"].passed


def test_a_mean_of_means_is_found(monkeypatch):
    from transformer_jax.tasks.causal_lm import CausalLM

    right = CausalLM.loss

    def mean(self, model, batch, key):
        total, weight = right(self, model, batch, key)
        return total / weight, jax.numpy.float32(1)

    monkeypatch.setattr(CausalLM, "loss", mean)
    checks = {check.name: check for check in verify(CONFIGS["gpt"], [{"data": 2}], steps=1)}
    assert checks["jit, data=2"].passed  # under jit the mean is over the whole batch
    assert not checks["4 micro-batches on one device"].passed
    assert checks["4 micro-batches on one device"].weight


def test_a_mesh_that_was_asked_for_and_does_not_fit_is_an_error():
    config = replace(CONFIGS["gpt"], model=replace(CONFIGS["gpt"].model, num_heads=2))
    with pytest.raises(UserError, match=r"heads=2 does not divide over the mesh axis tensor=4"):
        verify(config, [{"tensor": 4}], steps=1)


def test_a_loss_that_is_no_number_is_a_difference():
    found = _compare("", Outcome([1.0, float("nan")], {}), Outcome([1.0, 2.0], {}), 1e-4)
    assert not found.passed


def test_a_mesh_that_is_none_is_an_error():
    with pytest.raises(UserError, match="a mesh has no axis 'model'"):
        verify(TRANSFORMER, [{"model": 2}])
