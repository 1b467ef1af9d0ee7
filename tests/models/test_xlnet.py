import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.models.xlnet import XLNet, XLNetConfig
from transformer_jax.training import decays

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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (XLNetConfig.base(), 116_718_336 + 32_000),
        (replace(XLNetConfig.base(), lm_head=False), 116_718_336),
        (XLNetConfig.large(), 360_268_800 + 32_000),
    ],
)
def test_published_parameter_counts(config, expected):
    assert sum(leaf.size for leaf in leaves(abstract(config)).values()) == expected
    assert config.d_model // config.num_heads == 64


def test_two_streams_agree_with_the_papers_written_out_pair_by_pair():
    text, weights = Text(), weights_of(CONFIG)
    model, options = filled(CONFIG, weights), {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    query, memory = hidden_and_memory(model, text.ids, text.types, places=text.places, **options)
    watched = attention(model, text.ids, text.types, **options)
    logits = model.logits(query)
    for row in range(ROWS):
        expected = Naive(weights, CONFIG)(text, row)
        np.testing.assert_allclose(query[row], expected.query, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(memory[:, row], expected.memory, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(watched[:, row], expected.weights, rtol=1e-4, atol=1e-5)
        scores = expected.query @ weights["embedding/table"].T + weights["output_bias"]
        np.testing.assert_allclose(logits[row], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, ONE_SIDED])
def test_one_stream_agrees_with_the_papers_written_out_pair_by_pair(config):
    text, weights = Text(), weights_of(config)
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    content, memory = hidden_and_memory(filled(config, weights), text.ids, text.types, **options)
    for row in range(ROWS):
        expected = Naive(weights, config)(text, row)
        np.testing.assert_allclose(content[row], expected.content, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(memory[:, row], expected.memory, rtol=1e-4, atol=1e-5)


def test_vectors_of_small_variance_are_normalized_as_there():
    """Where 1e-12 beside the variance is much, and anything more is too much."""
    text, weights = Text(), dict(weights_of(CONFIG))
    for name in ("embedding/table", "mask_embedding", "encoder/blocks/self_attention/output/weight"):
        weights[name] = weights[name] * 1e-6
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    content, _ = hidden_and_memory(filled(CONFIG, weights), text.ids, text.types, **options)
    np.testing.assert_allclose(content[0], Naive(weights, CONFIG)(text, 0).content, rtol=1e-4, atol=1e-4)


def changes(function, ids):
    """Whether output [row, place] changes with the token at [row, j], as an array [row, place, j]."""
    before = np.asarray(function(ids))
    changed = []
    for j in range(LENGTH):
        other = ids.copy()
        other[:, j] = (ids[:, j] - PAD) % (VOCAB - PAD - 1) + PAD + 1
        assert (other != ids).sum() == ROWS
        changed.append(np.abs(function(other) - before).max(axis=-1) > 1e-4)
    return np.stack(changed, axis=-1)


def test_each_stream_depends_on_just_what_it_may_see():
    """On any path of three layers, of which the query stream takes the last. No place knows its own token."""
    text, model = Text(), make()
    # Any mask will do, not just that of an order. The first row has a place that sees nothing.
    text.allowed &= np.random.default_rng(1).random(text.allowed.shape) < 0.5
    text.allowed[0, text.places[0, 0]] = False
    options = {"valid": ALL_VALID, "allowed": text.allowed}

    content = changes(lambda ids: hidden_and_memory(model, ids, text.types, **options)[0], text.ids)
    query = changes(lambda ids: predict(model, ids, text.places, text.types, **options), text.ids)
    for row in range(ROWS):
        sees = text.allowed[row].astype(int)
        sees_itself = np.maximum(sees, np.eye(LENGTH, dtype=int))
        np.testing.assert_array_equal(content[row], np.linalg.matrix_power(sees_itself, 3) > 0)
        np.testing.assert_array_equal(query[row], (sees @ np.linalg.matrix_power(sees_itself, 2) > 0)[text.places[row]])
    assert not query[0, 0].any()


def test_an_order_of_prediction_hides_each_token_from_its_own_place():
    text, model = Text(), make()
    options = {"valid": ALL_VALID, "allowed": text.allowed}
    content = changes(lambda ids: hidden_and_memory(model, ids, text.types, **options)[0], text.ids)
    query = changes(lambda ids: predict(model, ids, text.places, text.types, **options), text.ids)
    for row in range(ROWS):
        assert content[row].diagonal().all()
        np.testing.assert_array_equal(query[row], text.allowed[row, text.places[row]])


def test_a_text_in_pieces_with_memory_equals_the_text_in_one():
    """Where no token sees a later one, a memory of all that came before leaves nothing out."""
    first, second, model = Text(0), Text(1), make()
    tril = np.tril(ALL_ALLOWED)
    _, memory = hidden_and_memory(model, first.ids, NO_TYPES, valid=ALL_VALID, allowed=tril)
    x, memory = hidden_and_memory(model, second.ids, NO_TYPES, valid=ALL_VALID, allowed=tril, memory=memory)
    ids = np.concatenate([first.ids, second.ids], axis=1)
    whole = forward(
        model, ids, allowed=np.tril(np.ones((ROWS, 2 * LENGTH, 2 * LENGTH), bool)), segments=np.zeros_like(ids)
    )
    np.testing.assert_allclose(x, whole[:, LENGTH:], rtol=1e-4, atol=1e-5)
    assert memory.shape == (CONFIG.num_layers, ROWS, 2 * LENGTH, CONFIG.d_model)


def test_no_gradient_flows_into_what_is_remembered():
    text = Text()
    gradients = jax.jit(jax.grad(lambda model: jnp.sum(model.hidden_and_memory(text.ids)[1])))(make())
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))


def test_padding_and_other_examples_in_a_row_change_nothing():
    """A text alone, and with padding on the left (as XLNet has it), on both sides, and with another beside it."""
    text, model = Text(), make()
    alone, _ = hidden_and_memory(model, text.ids, NO_TYPES, valid=ALL_VALID, allowed=ALL_ALLOWED)
    ids = np.full((ROWS, 2 * LENGTH), PAD)
    ids[0, LENGTH:], ids[1, 2 : LENGTH + 2] = text.ids[0], text.ids[1]
    ids[2] = np.concatenate([text.ids[0], text.ids[2]])
    segments = np.zeros_like(ids)
    segments[2, LENGTH:] = 1
    together = forward(model, ids, allowed=np.ones((ROWS, 2 * LENGTH, 2 * LENGTH), bool), segments=segments)
    np.testing.assert_allclose(together[0, LENGTH:], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[1, 2 : LENGTH + 2], alone[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[2, :LENGTH], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together[2, LENGTH:], alone[2], rtol=1e-4, atol=1e-5)


def test_dropout_is_a_function_of_the_key_of_the_row():
    text, model, others = Text(), make(replace(CONFIG, dropout_rate=0.25)), np.array([2, 0, 1])
    keys = jax.random.split(jax.random.key(0), ROWS)
    noisy = np.asarray(forward(model, text.ids, dropout_key=keys))
    np.testing.assert_allclose(forward(model, text.ids[others], dropout_key=keys[others]), noisy[others], atol=1e-5)
    assert not np.allclose(forward(model, text.ids, dropout_key=keys[others]), noisy, atol=0.1)


@pytest.mark.parametrize(
    ("rates", "one_stream", "two_streams"),
    [
        # Embedding, distances, last; weights, output of attention, inside and output of feed-forward.
        ({}, 3 + 4, 4 + 4 + 4),
        ({"attention_dropout_rate": 0.0}, 3 + 3, 4 + 3 + 3),
        ({"dropout_rate": 0.0}, 1, 2),
    ],
)
def test_dropout_is_everywhere_that_the_config_says(rates, one_stream, two_streams):
    text, keys = Text(), jax.random.split(jax.random.key(0), ROWS)

    def number(places):
        model = abstract(replace(CONFIG, **rates))
        function = partial(XLNet.hidden_and_memory, places=places, allowed=text.allowed)
        return str(jax.make_jaxpr(function)(model, text.ids, dropout_key=keys)).count("random_bits[")

    assert (number(None), number(text.places)) == (one_stream, two_streams)


def test_distances_are_dropped_row_by_row():
    keys = jax.random.split(jax.random.key(0), ROWS)
    model = make(replace(CONFIG, dropout_rate=0.25))
    distances = np.asarray(jax.jit(lambda model: model._distances(32, 32, keys))(model))
    assert distances.shape == (ROWS, 64, CONFIG.d_model)
    assert (distances == 0).mean() == pytest.approx(0.25, abs=0.05)
    assert not np.array_equal(distances[0] == 0, distances[1] == 0)


def test_bfloat16_computation_stays_near_float32():
    text, config = Text(), replace(CONFIG, dtype="bfloat16")
    x, _ = hidden_and_memory(make(config), text.ids)
    np.testing.assert_allclose(x.astype(jnp.float32), hidden_and_memory(make(), text.ids)[0], atol=0.1)
    far, expected = (jax.jit(lambda m: m._distances(1, 600, None))(make(each)) for each in (config, CONFIG))
    np.testing.assert_allclose(far.astype(jnp.float32), expected, atol=0.01)
    options = {"places": text.places, "allowed": text.allowed, "memory": text.memory}
    x, memory = jax.eval_shape(partial(XLNet.hidden_and_memory, **options), abstract(config), text.ids)
    assert x.dtype == memory.dtype == jnp.bfloat16
    assert jax.eval_shape(XLNet.logits, abstract(config), x).dtype == jnp.float32


def test_compiles_the_same_program_for_every_depth():
    text = Text()

    def equations(depth):
        model = abstract(replace(CONFIG, num_layers=depth))
        function = partial(XLNet.predict, allowed=text.allowed)
        return str(jax.make_jaxpr(function)(model, text.ids, text.places)).count("dot_general")

    assert equations(2) == equations(12)


def test_all_but_biases_and_norms_begin_with_the_same_deviation():
    config = replace(CONFIG, d_model=160, num_heads=4, d_ff=320, num_layers=2)
    model = jax.jit(lambda: XLNet(config, rngs=nnx.Rngs(0)))()
    for name, leaf in leaves(jax.device_get(model)).items():
        if name == "output_bias" or "norm/bias" in name or ("feed_forward" in name and "/bias" in name):
            assert not leaf.any()
        elif "norm/scale" in name:
            assert (leaf == 1).all()
        else:
            assert float(leaf.std()) == pytest.approx(0.02, rel=0.15), name


def test_every_parameter_names_its_axes():
    parameters = jax.tree.leaves(abstract(CONFIG), is_leaf=lambda x: isinstance(x, nnx.Param))
    assert len(parameters) == 20
    assert all(len(parameter.axes) == len(parameter.shape) for parameter in parameters)
    part = abstract(CONFIG).encoder.blocks.self_attention
    assert part.distance.weight.axes == ("layers", "embed", "heads", "head")
    assert part.type_embedding.axes == ("layers", "type", "heads", "head")


def test_matrices_decay_and_nothing_else_does():
    decayed = {name for name, decay in leaves(decays(abstract(CONFIG))).items() if decay}
    projections = ("query", "key", "value", "distance", "output")
    assert decayed == {
        "embedding/table",
        *(f"encoder/blocks/self_attention/{name}/weight" for name in projections),
        *(f"encoder/blocks/feed_forward/{way}/weight" for way in ("input", "output")),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide d_model=20; set num_heads to a divisor such as 2"),
        ({"d_model": 15}, "d_model=15 is odd"),
        ({"memory_length": 0}, "memory_length must be at least 1; got 0"),
        ({"max_distance": 0}, "max_distance must be at least 1; got 0"),
        ({"attention_dropout_rate": 1.0}, "attention_dropout_rate must be at least 0 and below 1; got 1.0"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **options)
    with pytest.raises(UserError, match="vocab_size and pad_id are the tokenizer's to say"):
        XLNet(replace(CONFIG, pad_id=None), rngs=nnx.Rngs(0))


def test_mistakes_are_named():
    text, model = Text(), make()
    options = {"valid": ALL_VALID, "allowed": text.allowed}
    for move, outside in ((1, 6), (-1, -1)):
        with pytest.raises(ValueError, match=f"place {outside} is outside the row of 6 tokens"):
            jax.eval_shape(partial(model.predict, places=text.places + move, **options), text.ids)
    # A compiled function cannot raise; it must not pass off another place's logits either.
    for move in (-1, 1):
        places = text.places + move
        outside = (places < 0) | (places >= LENGTH)
        logits = np.asarray(predict(model, text.ids, places, text.types, **options))
        np.testing.assert_array_equal(np.isnan(logits).all(axis=-1), outside)
    with pytest.raises(ValueError, match=r"memory has the shape \(3, 2, 6, 20\); .* need \(3, 3, 6, 20\)"):
        model(text.ids, memory=text.memory[:, :2])
    with pytest.raises(TypeError, match="mask must be boolean, True where attention is allowed; got float32"):
        model(text.ids, allowed=1 - text.allowed.astype(np.float32))


@cache
def original(config, **changes):
    """A model of transformers with the weights of ours, its tensors by their names there."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = transformers.XLNetConfig(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        d_inner=config.d_ff,
        mem_len=config.memory_length,
        **changes,
    )
    model = transformers.XLNetLMHeadModel(settings).eval()
    weights = weights_of(config)
    names = {
        "transformer.word_embedding.weight": weights["embedding/table"],
        "transformer.mask_emb": weights["mask_embedding"][None, None],
        "lm_loss.weight": weights["embedding/table"],
        "lm_loss.bias": weights["output_bias"],
    }
    ours = {
        "rel_attn.q": "self_attention/query/weight",
        "rel_attn.k": "self_attention/key/weight",
        "rel_attn.v": "self_attention/value/weight",
        "rel_attn.r": "self_attention/distance/weight",
        "rel_attn.o": "self_attention/output/weight",
        "rel_attn.r_w_bias": "self_attention/content_bias",
        "rel_attn.r_r_bias": "self_attention/distance_bias",
        "rel_attn.r_s_bias": "self_attention/type_bias",
        "rel_attn.seg_embed": "self_attention/type_embedding",
        "rel_attn.layer_norm.weight": "self_attention_residual/norm/scale",
        "rel_attn.layer_norm.bias": "self_attention_residual/norm/bias",
        "ff.layer_1.weight": "feed_forward/input/weight",
        "ff.layer_1.bias": "feed_forward/input/bias",
        "ff.layer_2.weight": "feed_forward/output/weight",
        "ff.layer_2.bias": "feed_forward/output/bias",
        "ff.layer_norm.weight": "feed_forward_residual/norm/scale",
        "ff.layer_norm.bias": "feed_forward_residual/norm/bias",
    }
    for layer in range(config.num_layers):
        for name, path in ours.items():
            value = weights[f"encoder/blocks/{path}"][layer]
            if name == "rel_attn.o":
                value = value.transpose(2, 0, 1)
            elif name.startswith("ff.layer_") and value.ndim == 2:
                value = value.T
            names[f"transformer.layer.{layer}.{name}"] = value
    model.load_state_dict({name: torch.tensor(value) for name, value in names.items()})
    return model


def run_original(model, text, **arguments):
    """Last hidden states, logits, memory [L B M D] and attention [L B N T S] of the content stream."""
    torch = pytest.importorskip("torch")
    given = {
        name: list(torch.tensor(value)) if name == "mems" else torch.tensor(value) for name, value in arguments.items()
    }
    with torch.no_grad():
        output = model(
            torch.tensor(text.ids), **given, use_mems=True, output_hidden_states=True, output_attentions=True
        )
    attentions = [layer[0] if isinstance(layer, tuple) else layer for layer in output.attentions]
    return SimpleNamespace(
        hidden=output.hidden_states[-1].numpy(),
        logits=output.logits.numpy(),
        memory=np.stack([layer.numpy().swapaxes(0, 1) for layer in output.mems]),
        weights=np.stack([layer.numpy() for layer in attentions]),
    )


def as_there(text):
    """What `text` says, as transformers says it: 1 is "may not see" in a mask of an order."""
    return {
        "token_type_ids": text.types,
        "attention_mask": text.valid.astype(np.float32),
        "perm_mask": 1 - text.allowed.astype(np.float32),
        "mems": text.memory.swapaxes(1, 2),
        "target_mapping": np.eye(LENGTH, dtype=np.float32)[text.places],
    }


def close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "given",
    [
        ("attention_mask",),
        ("token_type_ids",),
        ("perm_mask",),
        ("attention_mask", "token_type_ids", "perm_mask"),
        ("attention_mask", "mems"),
        ("token_type_ids", "mems"),
        ("attention_mask", "token_type_ids", "perm_mask", "mems"),
    ],
    ids=" ".join,
)
def test_one_stream_is_that_of_transformers(given):
    text, model = Text(), make()
    there = as_there(text)
    expected = run_original(original(CONFIG), text, **{name: there[name] for name in given})
    options = {
        "valid": text.valid if "attention_mask" in given else ALL_VALID,
        "allowed": text.allowed if "perm_mask" in given else ALL_ALLOWED,
        "memory": text.memory if "mems" in given else None,
    }
    x, memory = hidden_and_memory(model, text.ids, text.types if "token_type_ids" in given else NO_TYPES, **options)
    close(x, expected.hidden)
    close(memory, expected.memory)
    close(model.logits(x), expected.logits)
    assert memory.shape[2] == 2 * LENGTH if "mems" in given else LENGTH


def test_a_plain_text_is_that_of_transformers():
    text, model = Text(), make()
    expected = run_original(original(CONFIG), text)
    x, memory = hidden_and_memory(model, text.ids)
    close(x, expected.hidden)
    close(memory, expected.memory)


@pytest.mark.parametrize("remembers", [False, True])
def test_two_streams_are_those_of_transformers(remembers):
    """Where every place sees something: one that sees nothing sees all alike there, its own token too."""
    text, model = Text(), make()
    text.allowed[:, :, LENGTH - 1] |= np.arange(LENGTH)[None] != LENGTH - 1
    text.places = np.array([[3, 0], [4, 1], [1, 3]])
    options, there = {"valid": text.valid, "allowed": text.allowed}, as_there(text)
    if remembers:
        expected = run_original(original(CONFIG), text, **there)
        options |= {"places": text.places, "memory": text.memory}
        x, memory = hidden_and_memory(model, text.ids, text.types, **options)
        close(x, expected.hidden)
        close(memory, expected.memory)
        close(model.logits(x), expected.logits)
    else:
        del there["mems"]
        expected = run_original(original(CONFIG), text, **there)
        close(predict(model, text.ids, text.places, text.types, **options), expected.logits)


def test_one_sided_attention_is_that_of_transformers():
    """Without a mask of any kind, which transformers cannot add to its own here if there are several rows."""
    text = Text()
    there = {name: as_there(text)[name] for name in ("token_type_ids", "mems")}
    expected = run_original(original(ONE_SIDED, attn_type="uni", clamp_len=3), text, **there)
    options = {"valid": ALL_VALID, "allowed": ALL_ALLOWED, "memory": text.memory}
    x, memory = hidden_and_memory(make(ONE_SIDED), text.ids, text.types, **options)
    close(x, expected.hidden)
    close(memory, expected.memory)


def test_the_attention_is_that_of_transformers():
    text, there = Text(), as_there(Text())
    del there["target_mapping"]
    expected = run_original(original(CONFIG), text, **there)
    options = {"valid": text.valid, "allowed": text.allowed, "memory": text.memory}
    close(attention(make(), text.ids, text.types, **options), expected.weights)
