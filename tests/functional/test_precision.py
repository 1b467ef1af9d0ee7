"""float32 means float32 in every matrix product, on every device, unless JAX is told otherwise."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests import tiny
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    GPTConfig,
    T5Config,
    Transformer,
    XLNet,
    XLNetConfig,
)

SMALL = {"d_model": 8, "num_heads": 2, "d_ff": 16, "dtype": "float32"}
ONE, TWO = {"num_layers": 1, "max_length": 8}, {"num_encoder_layers": 1, "num_decoder_layers": 1}
IDS = jnp.arange(4, 10)[None]


def products(config, make, run):
    """The precision of each matrix product of a gradient, as the compiler is told."""
    model = jax.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
    gradient = jax.grad(lambda model: jnp.sum(run(model).astype(jnp.float32) ** 2))
    text = str(jax.make_jaxpr(gradient)(model))
    found = re.findall(r"dot_general\[(.*?)\n\s*\]", text, re.DOTALL)
    assert len(found) > 10
    return [bool(re.search(r"precision=\(?.*HIGHEST", parameters)) for parameters in found]


MODELS = {
    "transformer": (replace(tiny.CONFIG, **SMALL), Transformer, lambda model: model(IDS, IDS)),
    "experts": (
        replace(tiny.CONFIG, **SMALL, experts=ExpertsConfig(2, capacity_factor=1.0)),
        Transformer,
        lambda model: model(IDS, IDS),
    ),
    "gpt": (replace(GPTConfig.small(12), **SMALL, **ONE), GPT, lambda model: model(IDS)),
    "grouped": (
        replace(GPTConfig.llama(12), **SMALL, **ONE, num_key_heads=1),
        GPT,
        lambda model: model(IDS),
    ),
    "bert": (replace(BertConfig.base(12), **SMALL, **ONE), Bert, lambda model: model.masked_lm(model(IDS))),
    "t5": (replace(T5Config.small(12), **SMALL, **TWO, head_size=4), T5, lambda model: model(IDS, IDS)),
    "xlnet": (
        replace(XLNetConfig.base(12), **SMALL, **ONE),
        XLNet,
        lambda model: model.logits(model(IDS, jnp.zeros_like(IDS))),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_float32_model_multiplies_in_float32(name):
    assert all(products(*MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_model_does_not_pay_for_it(name):
    config, make, run = MODELS[name]
    highest = products(replace(config, dtype="bfloat16"), make, run)
    # The router's logits decide between experts: they are always exact.
    assert any(highest) == (name == "experts") and not all(highest)


def test_what_jax_is_told_holds():
    with jax.default_matmul_precision("tensorfloat32"):
        assert not any(products(*MODELS["transformer"]))
