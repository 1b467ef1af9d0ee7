"""Which weights are trained, and how fast."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from transformer_jax.errors import UserError
from transformer_jax.layers import Embedding, LayerNorm, Linear, Stack, is_parameter, named_parameters
from transformer_jax.models import BertConfig, TransformerConfig
from transformer_jax.training import OptimizerConfig, decays
from transformer_jax.training.serialization import from_json, to_json

KINDS = ("adam", "adafactor", "lion", "muon")

RATE = 0.5
BERT = replace(
    BertConfig.base(12),
    d_model=16,
    num_heads=2,
    d_ff=24,
    num_layers=3,
    max_length=8,
    heads=("pooler", "classifier"),
    num_labels=2,
)


@pytest.fixture(scope="module")
def model():
    return jax.jit(lambda: BERT.build(nnx.Rngs(0)))()


def updates(model, **settings):
    """The first update for a gradient of ones, by the names of the weights. Adam makes -1 times the rate of it."""
    optimizer = OptimizerConfig(schedule="linear", peak=RATE, warmup_steps=1, total_steps=10, **settings).build(16)
    gradients = jax.tree.map(jnp.ones_like, model)
    return named_parameters(jax.jit(lambda: optimizer.update(gradients, optimizer.init(model), model)[0])())


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.3, "clip_norm": 0.1}])
def test_what_is_frozen_is_not_changed_by_a_bit_and_all_else_is_as_without(model, settings):
    found, without = updates(model, freeze="embedding|encoder.*attention", **settings), updates(model, **settings)
    before = named_parameters(model)
    frozen = {name for name in before if name.startswith("embedding") or ("encoder" in name and "attention" in name)}
    assert 5 < len(frozen) < len(before)
    for name, update in found.items():
        after = before[name][...] + update[...]
        assert np.array_equal(after, before[name][...]) == (name in frozen), name
        if name not in frozen:
            np.testing.assert_allclose(update[...], without[name][...], rtol=1e-5)


def test_a_frozen_weight_has_no_moments(model):
    optimizer = OptimizerConfig(freeze="(?!pooler)").build(16)
    size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, model)))
    pooler = sum(leaf.size for leaf in jax.tree.leaves(model.pooler))
    assert 2 * pooler <= size <= 2 * pooler + 2  # Adam's two means, and the counts of steps


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("embeding", r"optimizer.freeze='embeding' matches no parameter; the names begin with .*embedding, .*pooler"),
        ("able", r"matches no parameter"),  # of embedding.table, but not at its beginning
        ("", r"matches every parameter; the names begin with"),
    ],
)
def test_a_pattern_that_divides_nothing_names_what_there_is(model, freeze, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(freeze=freeze).build(16).init(model)


def test_a_pattern_that_is_none_is_named():
    with pytest.raises(UserError, match=r"freeze='\(' is not a regular expression"):
        OptimizerConfig(freeze="(")


def test_each_layer_below_the_top_learns_slower_by_a_factor(model):
    decay, depth = 0.5, BERT.num_layers
    for name, update in updates(model, layer_decay=decay).items():
        if name.startswith("encoder."):
            powers = np.array([decay ** (depth - 1 - layer) for layer in range(depth)])
            expected = -RATE * np.broadcast_to(powers.reshape(-1, *[1] * (update.ndim - 1)), update.shape)
        else:
            expected = -RATE * decay**depth if "embedding" in name else -RATE
        np.testing.assert_allclose(update[...], expected, rtol=1e-5, err_msg=name)


def test_stacks_of_two_kinds_count_their_own_layers():
    config = replace(tiny.CONFIG, num_encoder_layers=1, num_decoder_layers=2)
    found = updates(tiny.make(config), layer_decay=0.1)
    encoder, decoder = (found[f"{stack}.blocks.feed_forward.input.bias"][:, 0] for stack in ("encoder", "decoder"))
    np.testing.assert_allclose(encoder, [-RATE], rtol=1e-5)
    np.testing.assert_allclose(decoder, [-RATE * 0.1, -RATE], rtol=1e-5)
    np.testing.assert_allclose(found["embedding.table"][...], -RATE * 0.01, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_a_factor_that_cannot_be_is_named(decay):
    with pytest.raises(UserError, match=f"layer_decay must be over 0 and at most 1; got {decay}"):
        OptimizerConfig(layer_decay=decay)


@pytest.mark.parametrize("freeze", ["embedding", "embedding|encoder"])
def test_layers_learn_slower_also_where_others_are_frozen(model, freeze):
    slower, frozen = updates(model, layer_decay=0.5), updates(model, layer_decay=0.5, freeze=freeze)
    for name, update in frozen.items():
        expected = np.zeros(update.shape) if re.match(freeze, name) else slower[name][...]
        np.testing.assert_allclose(update[...], expected, rtol=1e-6, err_msg=name)


def test_frozen_parameters_have_no_backward_pass(model):
    config = OptimizerConfig(freeze="embedding|encoder|position|type")

    def loss(model, stop):
        model = config.without_frozen_gradients(model) if stop else model
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model))

    gradients = {stop: named_parameters(jax.grad(loss)(model, stop)) for stop in (False, True)}
    for name, gradient in gradients[True].items():
        is_frozen = re.match("embedding|encoder|position|type", name)
        expected = np.zeros(gradient.shape) if is_frozen else gradients[False][name][...]
        np.testing.assert_array_equal(gradient[...], expected, err_msg=name)


def test_layers_of_flax_itself_decay_by_their_rank():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = {name: leaf.get_value() for name, leaf in named_parameters(decays(layer)).items()}
    assert found == {"kernel": True, "bias": False}
    optimizer = OptimizerConfig(schedule="linear", total_steps=5, weight_decay=0.1, layer_decay=0.5).build(None)
    found, _ = optimizer.update(layer, optimizer.init(layer), layer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


class Block(nnx.Module):
    """Two linear maps, from and to heads."""

    def __init__(self, d_model, rngs):
        heads = {"heads": 2, "head": 3}
        self.query = Linear({"embed": d_model}, heads, rngs=rngs)
        self.output = Linear(heads, {"embed": d_model}, bias=False, rngs=rngs)
        self.norm = LayerNorm(d_model, 1e-6, rngs=rngs)


class Small(nnx.Module):
    """Weights of every kind: a table, linear maps of two layers and of none, biases, norms."""

    def __init__(self, d_model=8):
        rngs = nnx.Rngs(0)
        self.embedding = Embedding(5, d_model, rngs=rngs)
        self.encoder = Stack(lambda rngs: Block(d_model, rngs), 2, rngs=rngs)
        self.head = Linear({"embed": d_model}, {"labels": 5}, rngs=rngs)

    def __call__(self, ids):
        x = self.embedding(ids)
        for layer in range(2):
            block = jax.tree.map(lambda leaf: leaf[layer], self.encoder.blocks)  # noqa: B023
            x = x + block.output(jax.nn.relu(block.query(block.norm(x))))
        return self.head(x)


MAPS = {"encoder.blocks.query.weight", "encoder.blocks.output.weight", "head.weight"}


@pytest.fixture(scope="module")
def small():
    return Small()


def noise(model, seed, scale=1.0):
    """A gradient for each weight, by its name. The second layer has a larger one."""
    random = np.random.default_rng(seed)
    found = {}
    for name, leaf in named_parameters(model).items():
        found[name] = scale * random.normal(size=leaf.shape).astype(np.float32)
        if leaf.axes[0] == "layers":
            found[name][1] *= 30
    return found


def several_updates(model, gradients, **settings):
    """Learning rate and updates, by the names of the weights, of one step after the other; and the last state."""
    config = OptimizerConfig(schedule="linear", peak=RATE, warmup_steps=1, total_steps=10, **settings)
    optimizer = config.build(None)
    leaves, structure = jax.tree.flatten(model)
    update, state, found = jax.jit(optimizer.update), jax.jit(optimizer.init)(model), []
    for step, gradient in enumerate(gradients):
        assert len(leaves) == len(gradient)
        new, state = update(jax.tree.unflatten(structure, gradient.values()), state, model)
        arrays = {name: np.asarray(leaf[...], np.float64) for name, leaf in named_parameters(new).items()}
        found.append((float(config.learning_rate(None)(step)), arrays))
    return found, state


def test_lion_is_the_sign_of_a_mean_with_another_decay_than_the_one_that_is_kept(small):
    gradients = [noise(small, seed) for seed in range(3)]
    found, _ = several_updates(small, gradients, kind="lion", weight_decay=0.3)
    weights = named_parameters(small)
    for name in weights:
        mean, decay = 0.0, 0.3 if name in MAPS | {"embedding.table"} else 0.0
        for gradient, (rate, update) in zip(gradients, found, strict=True):
            sign = np.sign(0.9 * mean + 0.1 * gradient[name])
            mean = 0.99 * mean + 0.01 * gradient[name]
            np.testing.assert_allclose(update[name], -rate * (sign + decay * weights[name][...]), rtol=1e-5)


def adafactor(gradients, shape, largest_decay=1.0):
    """Updates of a weight, or of a matrix of this shape as means of rows and columns (Shazeer and Stern 2018)."""
    full, rows, columns, found = 0.0, 0.0, 0.0, []
    for step, gradient in enumerate(np.float64(gradients), 1):
        decay = min(1 - step**-0.8, largest_decay)
        square = gradient**2 + 1e-30
        full = decay * full + (1 - decay) * square
        if shape is not None:
            square = square.reshape(shape)
            rows = decay * rows + (1 - decay) * square.mean(1)
            columns = decay * columns + (1 - decay) * square.mean(0)
        second = full if shape is None else np.outer(rows, columns).reshape(gradient.shape) / rows.mean()
        update = gradient / np.sqrt(second)
        found.append(update / max(1.0, np.sqrt(np.mean(update**2))))
    return found


@pytest.mark.parametrize("beta2", [None, 0.3])
def test_adafactor_keeps_means_of_inputs_and_of_outputs_of_each_layer(beta2):
    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.query = Linear({"embed": 128}, {"heads": 2, "head": 65}, rngs=rngs)
            self.output = Linear({"heads": 2, "head": 65}, {"embed": 128}, bias=False, rngs=rngs)

    model = Stack(Wide, 2, rngs=nnx.Rngs(0))
    gradients = [noise(model, step, 10.0**step) for step in range(3)]
    found, state = several_updates(model, gradients, kind="adafactor", beta2=beta2)
    shapes = {"blocks.query.weight": (128, 130), "blocks.output.weight": (130, 128), "blocks.query.bias": None}
    for name, shape in shapes.items():
        for layer in range(2):
            expected = adafactor([gradient[name][layer] for gradient in gradients], shape, beta2 or 1.0)
            for update, (rate, new) in zip(expected, found, strict=True):
                np.testing.assert_allclose(new[name][layer], -rate * update, rtol=2e-3, atol=1e-5, err_msg=name)
    statistics = [leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 3]
    assert sum(statistics) == 2 * (2 * (128 + 130) + 130)


def test_statistics_of_adafactor_name_the_axes_that_they_have():
    config = replace(TransformerConfig.base(300), d_model=128, d_ff=160, num_heads=2)
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    state = jax.eval_shape(OptimizerConfig(kind="adafactor").build(128).init, model)
    leaves = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_parameter) if is_parameter(leaf)]
    assert len(leaves) == 3 * len(named_parameters(model))
    assert all(len(leaf.axes) == len(leaf.shape) for leaf in leaves)
    sizes = {"layers": 6, "embed": 128, "ff": 160, "heads": 2, "head": 64, "vocab": 300}
    named = [leaf for leaf in leaves if any(leaf.axes)]
    assert named
    assert all(leaf.shape == tuple(sizes[axis] for axis in leaf.axes) for leaf in named)


def test_adafactor_with_beta1_is_a_mean_of_its_updates(small):
    gradients = [noise(small, seed) for seed in range(2)]
    with_mean, _ = several_updates(small, gradients, kind="adafactor", beta1=0.8)
    without, _ = several_updates(small, gradients, kind="adafactor")
    for name in gradients[0]:
        mean = 0.0
        for (rate, update), (_, plain) in zip(with_mean, without, strict=True):
            mean = 0.8 * mean + 0.2 * plain[name] / rate
            np.testing.assert_allclose(update[name], rate * mean, rtol=1e-4, atol=1e-6)


def test_muon_orthogonalizes_the_map_of_each_layer_with_its_heads_merged(small):
    first, second = gradients = [noise(small, seed) for seed in range(2)]
    found, _ = several_updates(small, gradients, kind="muon")
    # Nesterov's momentum with a decay of 0.95, each mean divided by the sum of its weights.
    momentum = {name: 0.95 * 0.05 * first[name] + 0.05 * second[name] for name in first}
    later = {name: 0.95 * momentum[name] / (1 - 0.95**3) + 0.05 * second[name] / (1 - 0.95**2) for name in first}
    for direction, (rate, update) in zip((first, later), found, strict=True):
        for name, shape in {"query.weight": (8, 6), "output.weight": (6, 8)}.items():
            for layer in range(2):
                matrix = direction[f"encoder.blocks.{name}"][layer].reshape(shape)
                left, _, right = np.linalg.svd(matrix, full_matrices=False)
                new = update[f"encoder.blocks.{name}"][layer].reshape(shape) / (-rate * 0.2 * 8**0.5)
                # Five iterations bring the singular values to 0.7 to 1.2, and keep the vectors.
                core = left.T @ new @ right.T
                assert np.all((np.diag(core) > 0.65) & (np.diag(core) < 1.25)), name
                np.testing.assert_allclose(core, np.diag(np.diag(core)), atol=1e-4, err_msg=name)
                np.testing.assert_allclose(new, left @ np.diag(np.diag(core)) @ right, atol=1e-4, err_msg=name)


def test_muon_leaves_all_that_is_no_linear_map_to_adam(small):
    gradients = [noise(small, seed) for seed in range(2)]
    (_, (rate, update)), state = several_updates(small, gradients, kind="muon")
    others = set(gradients[0]) - MAPS
    assert len(others) == 5
    for name in others:
        first, second = (gradient[name] for gradient in gradients)
        mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
        square = (0.95 * 0.05 * first**2 + 0.05 * second**2) / (1 - 0.95**2)
        np.testing.assert_allclose(update[name], -rate * mean / np.sqrt(square), rtol=1e-4, atol=1e-6)
    moments = {name: sum(leaf.size for leaf in jax.tree.leaves(state[1].inner_states[name])) for name in KINDS[::3]}
    sizes = {name: leaf.size for name, leaf in named_parameters(small).items()}
    assert moments["muon"] == sum(sizes[name] for name in MAPS) + 4  # a count of steps and three coefficients
    assert moments["adam"] == 2 * sum(sizes[name] for name in others) + 1


def test_an_output_layer_to_the_vocabulary_is_no_linear_map_for_muon():
    config = replace(tiny.CONFIG, tie_embeddings="none")
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    state = jax.eval_shape(OptimizerConfig(kind="muon").build(16).init, model)
    moments = named_parameters(state[1].inner_states["muon"].inner_state[0].mu)
    found = {name for name, leaf in moments.items() if jax.tree.leaves(leaf)}
    assert found == {name for name in moments if name.endswith(".weight")}
    assert sum(name.endswith(".table") for name in moments) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_just_the_weights_that_are_declared_to_decay_do(model, kind):
    config = OptimizerConfig("linear", 1, peak=RATE, total_steps=10, kind=kind, weight_decay=0.3)
    optimizer = config.build(None)
    # Every kind makes nothing of a gradient of zero.
    zeros = jax.tree.map(jnp.zeros_like, model)
    found = named_parameters(jax.jit(lambda: optimizer.update(zeros, optimizer.init(model), model)[0])())
    decayed = {name for name, update in found.items() if np.any(update[...])}
    maps = {name for name in found if name.endswith(".weight")}
    assert len(maps) == 8
    assert decayed == maps | {"embedding.table"}
    for name, weight in named_parameters(model).items():
        expected = -RATE * 0.3 * weight[...] if name in decayed else 0 * weight[...]
        np.testing.assert_allclose(found[name][...], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_clips_freezes_and_slows_layers_down(small, kind):
    gradients = [noise(small, 0, 100.0), noise(small, 1)]
    frozen = re.compile("head.weight|encoder.*norm")
    norms = [np.sqrt(sum(np.sum(g[name] ** 2) for name in g if not frozen.match(name))) for g in gradients]
    clipped = [{name: x / norm for name, x in g.items()} for g, norm in zip(gradients, norms, strict=True)]
    without, _ = several_updates(small, clipped, kind=kind)
    found, _ = several_updates(small, gradients, kind=kind, clip_norm=1.0, freeze=frozen.pattern, layer_decay=0.5)
    for (_, expected), (_, update) in zip(without, found, strict=True):
        for name, new in update.items():
            factor = 0.25 if name.startswith("embedding") else 0.0 if frozen.match(name) else 1.0
            if name.startswith("encoder"):
                factor *= np.array([0.5, 1.0]).reshape(2, *[1] * (new.ndim - 1))
            np.testing.assert_allclose(new, expected[name] * factor, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_lowers_a_loss(small, kind):
    ids = jnp.array([[0, 1, 2, 3, 4]])

    def loss(model):
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(model(ids)[0])))

    peak = 0.02 if kind == "lion" else 0.05
    optimizer = OptimizerConfig("linear", 2, peak=peak, total_steps=20, kind=kind).build(None)

    @jax.jit
    def train(model):
        def step(carry, _):
            model, state = carry
            value, gradient = jax.value_and_grad(loss)(model)
            update, state = optimizer.update(gradient, state, model)
            return (jax.tree.map(jnp.add, model, update), state), value

        return jax.lax.scan(step, (model, optimizer.init(model)), length=20)[1]

    losses = train(small)
    assert losses[0] > 1.0
    assert losses[-1] < 0.25 * losses[0]


def test_how_many_numbers_each_kind_keeps():
    model = jax.eval_shape(lambda: TransformerConfig.base(37_000).build(nnx.Rngs(0)))
    weights = sum(leaf.size for leaf in jax.tree.leaves(model))
    attentions, feed_forwards, table = 6 * (1 + 2) * 4, 12 * 2, 37_000 * 512
    maps = attentions * 512 * 512 + feed_forwards * 512 * 2048
    means = attentions * (512 + 512) + feed_forwards * (512 + 2048) + 37_000 + 512
    expected = {
        "adam": 2 * weights,
        "lion": weights,
        "muon": 2 * weights - maps,
        "adafactor": means + weights - maps - table,
    }
    for kind, count in expected.items():
        state = jax.eval_shape(OptimizerConfig(kind=kind).build(512).init, model)
        # Counts of steps, coefficients, and one number in place of each mean that is not kept.
        assert 0 <= sum(leaf.size for leaf in jax.tree.leaves(state)) - count < 200, kind


@pytest.mark.parametrize(
    "settings", [{"kind": "adam"}, {"kind": "lion"}, {"kind": "muon"}, {"kind": "adafactor", "beta1": 0.9}]
)
def test_means_in_bfloat16_have_half_the_bytes_and_nearly_the_same_updates(small, settings):
    gradients = [noise(small, seed) for seed in range(3)]
    full, wide = several_updates(small, gradients, **settings)
    half, narrow = several_updates(small, gradients, **settings, moment_dtype="bfloat16")
    elements = sum(leaf.size for leaf in jax.tree.leaves(small))
    saved = sum(leaf.nbytes for leaf in jax.tree.leaves(wide)) - sum(leaf.nbytes for leaf in jax.tree.leaves(narrow))
    assert saved == 2 * elements
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} >= {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    for (_, expected), (_, update) in zip(full, half, strict=True):
        for name, new in update.items():
            error = np.abs(new - expected[name])
            if settings["kind"] == "lion":  # a sign may turn where the mean is nearly zero
                assert np.mean(error > 1e-6) < 0.05
            else:
                assert np.max(error) < 0.03 * np.max(np.abs(expected[name])), name
    assert any(np.any(half[-1][1][name] != full[-1][1][name]) for name in gradients[0]) or settings["kind"] == "lion"


def test_the_state_of_adam_keeps_its_names(small):
    state = OptimizerConfig("linear", 1, total_steps=2).build(None).init(small)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    found = {jax.tree_util.keystr(path, simple=True, separator="/") for path in paths}
    names = [name.replace(".", "/") for name in named_parameters(small)]
    assert found == {"1/count", "3/count", *(f"1/{moment}/{name}/value" for moment in ("mu", "nu") for name in names)}


def test_a_run_keeps_the_numbers_that_its_kind_decided():
    before = {"type": "OptimizerConfig", "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}
    assert to_json(from_json(OptimizerConfig, before)) == to_json(OptimizerConfig())
    for kind, decided in {"lion": (0.9, 0.99, None), "muon": (0.95, 0.95, 1e-9), "adafactor": (0, 1, None)}.items():
        saved = to_json(OptimizerConfig(kind=kind))
        assert (saved["beta1"], saved["beta2"], saved["epsilon"]) == decided
        assert from_json(OptimizerConfig, saved) == OptimizerConfig(kind=kind)
    other = OptimizerConfig(kind="muon", beta1=0.9, beta2=0.99)
    assert from_json(OptimizerConfig, to_json(other)) == other
    with pytest.raises(UserError, match=r"OptimizerConfig has no 'betas'; the config is of another version"):
        from_json(OptimizerConfig, before | {"betas": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sgd"}, "kind='sgd' is unknown; choose adam, adafactor, lion, muon"),
        ({"moment_dtype": "float16"}, "moment_dtype='float16' is unknown; choose float32, bfloat16"),
        ({"beta1": 1.0}, "beta1 must be at least 0 and below 1; got 1.0"),
        ({"beta2": -0.1, "kind": "lion"}, "beta2 must be at least 0 and below 1; got -0.1"),
        ({"kind": "lion", "epsilon": 1e-8}, "epsilon=1e-08 is Adam's and kind='lion' has none; set epsilon=None"),
        ({"kind": "adafactor", "epsilon": 1e-8}, "kind='adafactor' has none; set epsilon=None"),
        ({"kind": "adafactor", "moment_dtype": "bfloat16"}, "kind='adafactor' keeps with beta1 over 0 only; set beta1"),
        ({"beta1": 0.999, "moment_dtype": "bfloat16"}, "beta1=0.999 is 1 in bfloat16, so that the mean of gradients"),
        ({"kind": "lion", "beta2": 0.999, "moment_dtype": "bfloat16"}, "beta2=0.999 is 1 in bfloat16"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        OptimizerConfig(**settings)


def test_muon_without_a_linear_map_to_train_is_named(small):
    with pytest.raises(UserError, match=r"kind='muon' updates linear maps, of which none is trained"):
        OptimizerConfig(kind="muon", freeze="encoder|head").build(16).init(small)
