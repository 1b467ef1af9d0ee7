"""Models of any config with weights that are large enough for everything to matter; nothing is compiled for them."""

from collections import Counter
from functools import cache
from importlib import import_module
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@cache
def abstract(config):
    """The model of a config, with shapes in place of its weights."""
    return jax.eval_shape(lambda: config.build(nnx.Rngs(0)))


def drawn(config, seed=0):
    """The model of a config as its initializers make it."""
    return jax.jit(lambda: config.build(nnx.Rngs(seed)))()


def filled(config, weights=None):
    """The model of a config with these weights, by name; by default those of `large`."""
    return fill(abstract(config), large(config) if weights is None else weights)


def large(config, seed=0):
    """Weights by name: around 1 for the scales of norms, else around 0."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(float(name.endswith("scale")), 0.3, leaf.shape).astype(np.float32)
        for name, leaf in named(abstract(config)).items()
    }


def fill(module, weights):
    """Any module with these weights, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(weights[_name(path)], jnp.float32), module)


def named(model):
    """What a model holds, by name."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def count(config):
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))


def first_block(stack):
    """The first layer of a stack, by itself."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], stack.blocks)


def activate(feed_forward, points):
    """What a network makes of some numbers when its matrices are identities: its activation of them."""
    network = jax.tree.map(
        lambda leaf: np.eye(*leaf.shape, dtype=np.float32) if leaf.ndim == 2 else 0 * leaf, feed_forward
    )
    x = np.zeros((1, 1, feed_forward.input.weight.shape[0]), np.float32)
    x[0, 0, : len(points)] = points
    return np.asarray(jax.jit(type(network).__call__)(network, x))[0, 0, : len(points)]


def drops(method, config, *inputs):
    """What is dropped in a pass, one layer standing for all: how many arrays of each shape, and at which rate."""
    dropped = []

    def record(x, salt, rate):
        dropped.append((x.shape[1:], rate))
        return x

    keys = jax.random.split(jax.random.key(0), len(inputs[0]))
    with mock.patch.object(import_module("transformer_jax.functional.dropout"), "_drop", record):
        jax.eval_shape(lambda model: method(model, *inputs, dropout_key=keys), abstract(config))
    return Counter(dropped)


def program(method, config, *inputs):
    """How many lines the program has that a method of a config's model is compiled from."""
    return len(jax.jit(method).lower(abstract(config), *inputs).as_text().splitlines())


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
