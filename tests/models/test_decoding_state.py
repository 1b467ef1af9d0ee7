"""Decoding token by token computes what training computes, and carries no more along than changes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models.weights import filled
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import T5Config

T5 = replace(
    T5Config.small(tiny.VOCAB, pad_id=tiny.PAD),
    d_model=16,
    num_heads=2,
    head_size=8,
    d_ff=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dtype="float32",
)


def limited(config):
    """With experts that take half of an even share: in a decoder, a token would depend on those after it."""
    return replace(config, experts=ExpertsConfig(4, capacity_factor=0.5))


@pytest.mark.parametrize("config", [tiny.CONFIG, T5], ids=["transformer", "t5"])
def test_a_step_leaves_the_keys_and_values_of_the_encoder_where_they_are(config):
    model = filled(config)
    source, target = tiny.pairs()
    state = model.start(source, length=4)
    jaxpr = jax.make_jaxpr(lambda tokens, state: model.decode(tokens, state)[1])(target[:, :1], state)
    carried = {id(variable) for variable in jaxpr.jaxpr.invars} & {id(variable) for variable in jaxpr.jaxpr.outvars}
    # What goes in and comes out untouched: keys and values of the encoder, and which of its outputs are not padding.
    assert len(carried) == 3
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    shapes = [variable.aval.shape for variable in scan.outvars]
    assert state.memory.key.shape not in shapes and state.cache.key.shape in shapes


@pytest.mark.parametrize("config", [limited(tiny.CONFIG), limited(T5)], ids=["transformer", "t5"])
def test_experts_with_a_limit_decode_what_they_were_trained_on(config):
    model = filled(config)
    source, target = tiny.pairs(target_length=8)
    source, target = source[:1], target[:1]
    whole = jax.jit(lambda model: model(source, target))(model)
    state, pieces = jax.jit(lambda model: model.start(source, 8))(model), []
    step = jax.jit(lambda model, tokens, state: model.decode(tokens, state))
    for position in range(8):
        logits, state = step(model, target[:, position : position + 1], state)
        pieces.append(logits)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)
    # The encoder keeps its limit: what it gives is not what it would give with room for all.
    roomy = filled(replace(config, experts=replace(config.experts, capacity_factor=None)))
    assert not np.allclose(model.encode(source), roomy.encode(source), atol=1e-3)
