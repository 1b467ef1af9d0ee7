"""What holds for the config of every model, a user's own included."""

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.weights import abstract, named
from transformer_jax import models
from transformer_jax.functional import RotaryScaling
from transformer_jax.layers import ExpertsConfig, Linear, is_parameter
from transformer_jax.models import (
    GPT,
    T5,
    Bert,
    BertConfig,
    GPTConfig,
    ModelConfig,
    T5Config,
    Transformer,
    TransformerConfig,
    XLNet,
    XLNetConfig,
)

SMALL = {"vocab_size": 11, "d_model": 8, "num_heads": 2, "d_ff": 12}
LAYERS = {"num_encoder_layers": 1, "num_decoder_layers": 1}
CONFIGS = {
    Transformer: replace(TransformerConfig.base(), **SMALL, **LAYERS),
    T5: replace(T5Config.small(), **SMALL, **LAYERS),
    Bert: replace(
        BertConfig.base(), **SMALL, num_layers=1, heads=("pooler", "classifier", "tagger", "span"), num_labels=3
    ),
    GPT: replace(GPTConfig.small(), **SMALL, num_layers=1, heads=("classifier", "tagger"), num_labels=3),
    XLNet: replace(XLNetConfig.base(), **SMALL, num_layers=1),
}
each_model = pytest.mark.parametrize(
    ("kind", "config"), CONFIGS.items(), ids=lambda value: getattr(value, "__name__", "")
)
OTHER = {"dtype": "bfloat16", "rematerialize": "full", "unroll": 2}


@dataclass(frozen=True)
class ScaledConfig(ModelConfig):
    """A user's own model, which has no vocabulary, no padding and no precision of ours."""

    adjustable: ClassVar[tuple[str, ...]] = ("factor",)

    size: int
    factor: float = 2.0

    def build(self, rngs: nnx.Rngs) -> "Scaled":
        return Scaled(self, rngs=rngs)


class Scaled(nnx.Module):
    def __init__(self, config: ScaledConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.linear = Linear({"embed": config.size}, {"out": 1}, rngs=rngs)

    def __call__(self, x):
        return self.config.factor * self.linear(x)


def test_a_users_own_config_builds_its_model():
    model = ScaledConfig(3).build(nnx.Rngs(0))
    weight, x = np.asarray(model.linear.weight[...]), np.ones((2, 3), np.float32)
    gradient = jax.jit(jax.grad(lambda model: jnp.sum(Scaled.__call__(model, x))))(model)
    np.testing.assert_allclose(jax.jit(Scaled.__call__)(model, x), 2 * x @ weight, rtol=1e-6)
    np.testing.assert_allclose(gradient.linear.weight[...], np.full((3, 1), 4.0))
    assert list(named(abstract(ScaledConfig(3)))) == ["linear/bias", "linear/weight"]


def test_a_config_that_builds_nothing_cannot_be_made():
    @dataclass(frozen=True)
    class Unfinished(ModelConfig):
        size: int

    with pytest.raises(TypeError, match="build"):
        Unfinished(3)
    assert fields(ModelConfig) == ()


@each_model
def test_a_config_builds_the_model_of_its_kind(kind, config):
    assert type(abstract(config)) is kind and abstract(config).config == config


@each_model
def test_adjustable_fields_change_no_weight(kind, config):
    rates = {field.name for field in fields(config) if field.name.endswith("dropout_rate")}
    assert set(config.adjustable) == rates | OTHER.keys()
    changed = replace(config, **OTHER, **dict.fromkeys(rates, 0.5))
    before, after = (named(abstract(config)) for config in (config, changed))
    assert {name: leaf.shape for name, leaf in before.items()} == {name: leaf.shape for name, leaf in after.items()}


def test_only_what_gives_labels_has_an_axis_of_labels():
    heads = ("pooler", "masked_lm", "next_sentence", "classifier", "tagger", "span")
    # Two labels, as many as a span or a pair has: sizes alone could not tell them apart.
    model = abstract(replace(CONFIGS[Bert], heads=heads, num_labels=2))
    found = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, parameter in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_parameter)
        if "labels" in parameter.axes
    }
    assert found == {
        f"{head}_head.output.{part}" for head in ("classification", "tagging") for part in ("weight", "bias")
    }


@pytest.mark.parametrize(
    "config",
    [*(getattr(models, name) for name in models.__all__ if name.endswith("Config")), ExpertsConfig, RotaryScaling],
)
def test_every_field_has_a_sentence_of_help(config):
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    documented = {}
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            documented[statement.target.id] = " ".join(after.value.value.split())
    for field in fields(config):
        text = documented.get(field.name, "")
        assert text.endswith(".") and text[0].isupper(), f"{config.__name__}.{field.name}: {text!r}"
