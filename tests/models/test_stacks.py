"""How a config says its layers are to be run, in all models."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.layers import Stack
from transformer_jax.models import BertConfig, GPTConfig, T5Config, TransformerConfig, XLNetConfig

CONFIGS = [BertConfig.base(), GPTConfig.small(), T5Config.small(), TransformerConfig.base(99), XLNetConfig.base()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize(("rematerialize", "unroll"), [("none", 1), ("full", 3)])
def test_every_stack_is_run_as_the_config_says(config, rematerialize, unroll):
    said = replace(config, rematerialize=rematerialize, unroll=unroll)
    model = jax.eval_shape(lambda: said.build(nnx.Rngs(0)))
    stacks = [module for _, module in nnx.iter_modules(model) if isinstance(module, Stack)]
    assert len(stacks) == (2 if isinstance(config, (T5Config, TransformerConfig)) else 1)
    assert all((stack.rematerialize, stack.unroll) == (rematerialize, unroll) for stack in stacks)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("value", ["some", True, None])
def test_an_unknown_policy_is_named(config, value):
    with pytest.raises(UserError, match=f"rematerialize={value!r} is unknown; choose none, full, dots"):
        replace(config, rematerialize=value)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_at_least_one_layer_is_compiled(config):
    with pytest.raises(UserError, match="unroll must be at least 1; got 0"):
        replace(config, unroll=0)
