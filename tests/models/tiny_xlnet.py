"""A small XLNet, texts with all that can be said about them, and the papers written out pair by pair."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.models.xlnet import XLNet, XLNetConfig

PAD, VOCAB, ROWS, LENGTH = 5, 24, 3, 6

CONFIG = replace(
    XLNetConfig.base(VOCAB, pad_id=PAD), d_model=20, num_heads=5, d_ff=12, num_layers=3, max_length=16, dtype="float32"
)
ONE_SIDED = replace(CONFIG, causal=True, max_distance=3, memory_length=4)

forward = jax.jit(XLNet.__call__)
predict = jax.jit(XLNet.predict)
attention = jax.jit(XLNet.attention)
hidden_and_memory = jax.jit(XLNet.hidden_and_memory)


@cache
def abstract(config):
    return jax.eval_shape(lambda: XLNet(config, rngs=nnx.Rngs(0)))


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def leaves(model):
    return {named(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def filled(config, weights):
    """The model of a config with these weights, by name."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.asarray(weights[named(path)]), abstract(config))


@cache
def weights_of(config):
    """Weights large enough for every term of the scores to matter."""
    random = np.random.default_rng(0)
    return {
        name: random.normal(float("scale" in name), 0.3, leaf.shape).astype(np.float32)
        for name, leaf in leaves(abstract(config)).items()
    }


@cache
def make(config=CONFIG):
    return filled(config, weights_of(config))


class Text:
    """Rows with all that can be said about them: types, padding on the left, an order of prediction in each row."""

    def __init__(self, seed=0):
        random = np.random.default_rng(seed)
        self.ids = random.integers(PAD + 1, VOCAB, (ROWS, LENGTH))
        self.types = np.sort(random.integers(0, 3, (ROWS, LENGTH)))
        self.valid = np.arange(LENGTH)[None] >= np.array([[0], [1], [3]])
        order = np.stack([random.permutation(LENGTH) for _ in range(ROWS)])
        self.allowed = order[:, :, None] > order[:, None, :]
        self.places = np.array([[5, 0], [2, 4], [3, 5]])
        self.memory = random.normal(size=(CONFIG.num_layers, ROWS, LENGTH, CONFIG.d_model)).astype(np.float32)


ALL_VALID = np.ones((ROWS, LENGTH), bool)
ALL_ALLOWED = np.ones((ROWS, LENGTH, LENGTH), bool)
NO_TYPES = np.zeros((ROWS, LENGTH), int)


class Naive:
    """XLNet once more for one row, pair by pair: positions are looked up by their distance, and nothing is shifted."""

    def __init__(self, weights, config):
        self.weights, self.config = {name: value.astype(np.float64) for name, value in weights.items()}, config

    def __call__(self, text, row):
        """Content and query stream, the memory after them, and the weights of the content stream."""
        ids, types, valid, allowed, places = (
            part[row] for part in (text.ids, text.types, text.valid, text.allowed, text.places)
        )
        memory = text.memory[:, row]
        if self.config.causal:
            allowed = np.tril(allowed)
        content = self.weights["embedding/table"][ids]
        query = np.stack([self.weights["mask_embedding"]] * len(places))
        known_types = np.concatenate([np.zeros(len(memory[0]), int), types])
        tokens, kept, watched = range(len(ids)), [], []
        for layer in range(self.config.num_layers):
            self.block = {
                name.removeprefix("encoder/blocks/"): value[layer]
                for name, value in self.weights.items()
                if name.startswith("encoder/blocks/")
            }
            self.known, self.known_types, self.types = np.concatenate([memory[layer], content]), known_types, types
            kept.append(self.known[-(self.config.memory_length or 0) :])
            content, seen = self.layer(content, tokens, lambda i, j: i == j or (allowed[i, j] and valid[j]))
            query, _ = self.layer(query, places, lambda i, j: allowed[i, j] and valid[j])
            watched.append(seen)
        return SimpleNamespace(content=content, query=query, memory=np.stack(kept), weights=np.stack(watched))

    def layer(self, x, places, sees):
        y, weights = self.attend(x, places, sees)
        x = self.norm(x + y, "self_attention_residual")
        hidden = x @ self.block["feed_forward/input/weight"] + self.block["feed_forward/input/bias"]
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        y = hidden @ self.block["feed_forward/output/weight"] + self.block["feed_forward/output/bias"]
        return self.norm(x + y, "feed_forward_residual"), weights

    def attend(self, x, places, sees):
        part = {name.removeprefix("self_attention/"): value for name, value in self.block.items()}
        before = len(self.known) - len(self.types)
        out, all_weights = np.zeros_like(x), np.zeros((self.config.num_heads, len(x), len(self.known)))
        for head, p in np.ndindex(self.config.num_heads, len(x)):
            i = places[p]
            query = x[p] @ part["query/weight"][:, head]
            scores = {}
            for j in range(len(self.known)):
                if j >= before and not sees(i, j - before):
                    continue
                key = self.known[j] @ part["key/weight"][:, head]
                distance = self.sinusoid(before + i - j) @ part["distance/weight"][:, head]
                kind = part["type_embedding"][0 if self.types[i] == self.known_types[j] else 1, head]
                score = (
                    (query + part["content_bias"][head]) @ key
                    + (query + part["distance_bias"][head]) @ distance
                    + (query + part["type_bias"][head]) @ kind
                )
                scores[j] = score / math.sqrt(len(query))
            total = sum(math.exp(score) for score in scores.values())
            for j, score in scores.items():
                weight = all_weights[head, p, j] = math.exp(score) / total
                value = self.known[j] @ part["value/weight"][:, head]
                out[p] += weight * value @ part["output/weight"][head]
        return out, all_weights

    def sinusoid(self, distance):
        half = self.config.d_model // 2
        if self.config.max_distance is not None:
            distance = max(-self.config.max_distance, min(self.config.max_distance, distance))
        angles = [distance / 10_000 ** (i / half) for i in range(half)]
        return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])

    def norm(self, x, name):
        scale, bias = self.block[f"{name}/norm/scale"], self.block[f"{name}/norm/bias"]
        return np.stack([(row - row.mean()) / np.sqrt(row.var() + 1e-12) for row in x]) * scale + bias
