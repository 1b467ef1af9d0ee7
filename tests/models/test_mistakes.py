"""What is asked of a model in the wrong way is named, on the way in and not as NaN on the way out."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import GPT, T5, Bert, BertConfig, GPTConfig, T5Config, Transformer, XLNet, XLNetConfig

SMALL = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "max_length": 6, "dtype": "float32"}
BERT = replace(BertConfig.base(12), **SMALL, heads=())
GPT2 = replace(GPTConfig.small(12), **SMALL)
XLNET = replace(XLNetConfig.base(12), **SMALL, lm_head=False)
T5_ENCODER = replace(
    T5Config.small(12),
    d_model=8,
    num_heads=2,
    head_size=4,
    d_ff=16,
    num_encoder_layers=1,
    num_decoder_layers=0,
    lm_head=False,
    dtype="float32",
)
IDS, HIDDEN = jnp.arange(3, 7)[None], jnp.ones((1, 4, 8))


def abstract(kind, config):
    return jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))


CALLS = {
    "ids": [
        (Bert, BERT, lambda model, ids: model(ids)),
        (Bert, BERT, lambda model, ids: model.attention(ids)),
        (GPT, GPT2, lambda model, ids: model(ids)),
        (GPT, GPT2, lambda model, ids: model.hidden(ids)),
        (XLNet, XLNET, lambda model, ids: model(ids)),
    ],
    "types": [(Bert, BERT, lambda model, types: model(IDS, types))],
    "tokens": [
        (GPT, GPT2, lambda model, tokens: model.decode(tokens, model.start(1, 4))),
        (Transformer, tiny.CONFIG, lambda model, tokens: model.decode(tokens, model.start(IDS, 4))),
    ],
    "source": [
        (Transformer, tiny.CONFIG, lambda model, source: model(source, IDS)),
        (Transformer, tiny.CONFIG, lambda model, source: model.start(source, 4)),
        (T5, T5_ENCODER, lambda model, source: model.encode(source)),
    ],
    "target": [(Transformer, tiny.CONFIG, lambda model, target: model(IDS, target))],
}


@pytest.mark.parametrize(("name", "kind", "config", "call"), [(name, *c) for name in CALLS for c in CALLS[name]])
def test_what_is_not_rows_of_ids_is_named(name, kind, config, call):
    def run(given):
        jax.eval_shape(lambda model: call(model, given), abstract(kind, config))

    with pytest.raises(ValueError, match=rf"{name} needs the axes \[batch, length\]; got shape \(4,\); give {name}"):
        run(IDS[0])
    with pytest.raises(ValueError, match=rf"{name} needs the axes \[batch, length\]; got shape \(1, 1, 4\)"):
        run(IDS[None])
    with pytest.raises(TypeError, match=f"{name} must be an array of integers; got float32"):
        run(IDS.astype(jnp.float32))
    with pytest.raises(TypeError, match=f"{name} must be an array of integers; got list"):
        run([[3, 4]])


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("pool", "pooler"),
        ("masked_lm", "masked_lm"),
        ("next_sentence", "next_sentence"),
        ("classify", "classifier"),
        ("tag", "tagger"),
        ("span", "span"),
    ],
)
def test_a_head_that_is_not_there_is_named(method, head):
    message = rf"the model has no head '{head}' \(its heads: none\); make or load one with it in heads"
    with pytest.raises(ValueError, match=message):
        getattr(abstract(Bert, BERT), method)(HIDDEN)


@pytest.mark.parametrize(("kind", "config"), [(GPT, replace(GPT2, lm_head=False)), (XLNet, XLNET), (T5, T5_ENCODER)])
def test_a_model_without_an_output_layer_says_so(kind, config):
    with pytest.raises(ValueError, match=r"no output layer \(lm_head=False\)"):
        abstract(kind, config).logits(HIDDEN)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(IDS, IDS),
        lambda model: model.hidden(IDS, IDS),
        lambda model: model.attention(IDS, IDS),
        lambda model: model.start(IDS, 4),
    ],
)
def test_an_encoder_alone_does_not_decode(call):
    with pytest.raises(ValueError, match=r"an encoder alone \(num_decoder_layers=0\); use its `encode`"):
        call(abstract(T5, T5_ENCODER))


@pytest.mark.parametrize(
    ("kind", "config", "start"),
    [
        (GPT, GPT2, lambda model, length: model.start(2, length)),
        (
            Transformer,
            replace(tiny.CONFIG, positions="learned", max_length=6),
            lambda model, length: model.start(IDS, length),
        ),
    ],
)
def test_there_is_no_room_beyond_the_learned_positions(kind, config, start):
    model = abstract(kind, config)
    jax.eval_shape(lambda model: start(model, 6), model)
    with pytest.raises(ValueError, match="learned positions for max_length=6 tokens; 7 are asked for"):
        jax.eval_shape(lambda model: start(model, 7), model)


def test_rows_padded_on_the_left_have_room_from_where_they_begin():
    model = abstract(GPT, GPT2)
    model.start(2, 8, np.array([2, 3]))
    with pytest.raises(ValueError, match="max_length=6 tokens; 7 are asked for"):
        model.start(2, 8, np.array([1, 3]))


def test_rotary_positions_have_no_end():
    config = replace(GPTConfig.llama(12), **SMALL)
    assert abstract(GPT, config).start(1, 100).capacity == 100


def test_a_gpt_has_no_experts_with_a_limit():
    with pytest.raises(UserError, match=r"experts.capacity_factor=1.25 makes a token depend on those after it"):
        replace(GPT2, experts=ExpertsConfig(4, capacity_factor=1.25))
