from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from tests.models import reference
from transformer_jax.errors import UserError
from transformer_jax.models import Transformer, TransformerConfig
from transformer_jax.training import decays


def abstract(config):
    return jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def leaves(model):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }


def count(config):
    return sum(leaf.size for leaf in leaves(abstract(config)).values())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TransformerConfig.base(37_000), 63_082_496),
        (TransformerConfig.big(37_000), 214_245_376),
        (TransformerConfig.base(32_000), 60_522_496),
        # Pre-norm adds a final norm to either stack.
        (replace(TransformerConfig.base(37_000), norm="pre"), 63_082_496 + 2 * 2 * 512),
        # Untied: a table for the source, one for the target, one for the output.
        (replace(TransformerConfig.base(37_000), tie_embeddings="none"), 63_082_496 + 2 * 37_000 * 512),
        (replace(TransformerConfig.base(37_000), positions="learned"), 63_082_496 + 2 * 512 * 512),
    ],
)
def test_published_parameter_counts(config, expected):
    assert count(config) == expected


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_agrees_with_the_paper_written_out_in_numpy(norm):
    config = replace(tiny.CONFIG, norm=norm)
    model = tiny.make(config)
    flat = {name: np.asarray(leaf, np.float64) for name, leaf in leaves(model).items()}
    random = np.random.default_rng(0)
    flat = {name: value + 0.1 * random.normal(size=value.shape) for name, value in flat.items()}
    model = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(
            flat[jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")], jnp.float32
        ),
        model,
    )

    def blocks(side):
        prefix = f"{side}/blocks/"
        return {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}

    weights = {"table": flat["embedding/table"], "encoder": blocks("encoder"), "decoder": blocks("decoder")}
    if norm == "pre":
        for side in ("encoder", "decoder"):
            weights[f"{side}_norm"] = flat[f"{side}_norm/scale"], flat[f"{side}_norm/bias"]
    source, target = tiny.pairs(rows=1)
    expected = reference.transformer(weights, config, source[0], target[0])
    np.testing.assert_allclose(tiny.forward(model, source, target)[0], expected, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing():
    model = tiny.make()
    source, target = tiny.pairs()
    logits = tiny.forward(model, source, target)
    length = target.shape[1]
    for extra in (1, 7, 64):
        padded = [jnp.pad(ids, ((0, 0), (0, extra)), constant_values=tiny.PAD) for ids in (source, target)]
        np.testing.assert_allclose(tiny.forward(model, *padded)[:, :length], logits, atol=1e-5)
    words = [ids[3:, : int((ids[3] != tiny.PAD).sum())] for ids in (source, target)]
    alone = tiny.forward(model, *words)
    np.testing.assert_allclose(alone[0], logits[3, : words[1].shape[1]], atol=1e-5)


def test_no_logit_depends_on_a_later_target_token():
    model = tiny.make()
    source, target = tiny.pairs()
    before = tiny.forward(model, source, target)
    after = tiny.forward(model, source, target.at[:, 3].set(5))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert not np.allclose(before[:, 3:], after[:, 3:])


def test_variances_at_the_start():
    config = replace(TransformerConfig.base(1000), num_encoder_layers=1, num_decoder_layers=1, dtype="float32")
    model = tiny.make(config)
    table = model.embedding.table[...]
    assert float(table.std()) == pytest.approx(512**-0.5, rel=0.02)
    source = jnp.arange(1, 33)[None]
    embedded = model._embed(source, side="source")
    assert float(embedded.std()) == pytest.approx((1 + 0.5) ** 0.5, rel=0.1)  # of the embedding, and of a sinusoid
    logits = tiny.forward(model, source, source)
    assert 0.5 < float(logits.std()) < 2


def test_compiles_the_same_program_for_every_depth():
    def equations(depth):
        config = replace(tiny.CONFIG, num_encoder_layers=depth, num_decoder_layers=depth)
        jaxpr = jax.make_jaxpr(Transformer.__call__)(abstract(config), *tiny.pairs())
        return str(jaxpr).count("dot_general")

    assert equations(2) == equations(12)


def test_rematerialization_changes_no_gradient():
    source, target = tiny.pairs()
    key = jax.random.key(1)

    @jax.jit
    def gradient(model):
        return jax.grad(lambda model: jnp.sum(model(source, target, dropout_key=key) ** 2))(model)

    plain = gradient(tiny.make())
    again = gradient(tiny.make(replace(tiny.CONFIG, rematerialize=True)))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_every_parameter_names_its_axes():
    parameters = jax.tree.leaves(abstract(tiny.CONFIG), is_leaf=lambda x: isinstance(x, nnx.Param))
    assert len(parameters) == 43
    for parameter in parameters:
        assert len(parameter.axes) == len(parameter.shape)
    query = abstract(tiny.CONFIG).encoder.blocks.self_attention.query
    assert query.weight.axes == ("layers", "embed", "heads", "head")
    assert query.bias.axes == ("layers", "heads", "head")


def test_matrices_decay_and_nothing_else_does():
    config = replace(tiny.CONFIG, tie_embeddings="none", positions="learned", norm="pre")
    decayed = {name for name, decay in leaves(decays(abstract(config))).items() if decay}
    attention = [f"{part}/weight" for part in ("query", "key", "value", "output")]
    assert decayed == {
        "embedding/table",
        "target_embedding/table",
        "output/table",
        *(f"encoder/blocks/self_attention/{name}" for name in attention),
        *(f"decoder/blocks/{kind}_attention/{name}" for kind in ("self", "cross") for name in attention),
        *(f"{side}/blocks/feed_forward/{way}/weight" for side in ("encoder", "decoder") for way in ("input", "output")),
    }


def test_bfloat16_computation_stays_near_float32():
    source, target = tiny.pairs()
    model = tiny.make()
    narrow = tiny.make(replace(tiny.CONFIG, dtype="bfloat16"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(narrow))
    logits = tiny.forward(narrow, source, target)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.forward(model, source, target), atol=0.15)


def test_learned_positions_and_untied_embeddings_train():
    config = replace(tiny.CONFIG, tie_embeddings="none", positions="learned")
    source, target = tiny.pairs()
    gradients = jax.jit(jax.grad(lambda model: jnp.sum(model(source, target)[..., 0])))(tiny.make(config))
    assert all(bool(jnp.any(leaf != 0)) for name, leaf in leaves(gradients).items() if "table" in name)


def test_attention_weights_are_those_of_the_pass():
    model = tiny.make()
    source, target = tiny.pairs()
    weights = jax.jit(Transformer.attention)(model, source, target)
    assert weights.encoder.shape == (2, 4, 2, 6, 6)
    assert weights.cross.shape == (2, 4, 2, 5, 6)
    np.testing.assert_allclose(weights.decoder.sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(jnp.triu(weights.decoder, 1), 0)
    np.testing.assert_array_equal(weights.cross[:, 3, :, :, 3:], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide d_model=16; set num_heads to a divisor such as 2"),
        ({"d_model": 0}, "d_model must be at least 1; got 0"),
        ({"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1; got 1.0"),
        ({"d_model": 15, "num_heads": 3}, "d_model=15 is odd"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(tiny.CONFIG, **changes)


def test_ids_outside_the_vocabulary():
    model = tiny.make()
    source, target = tiny.pairs()
    with pytest.raises(UserError, match="id 12 is outside the vocabulary of 12"):
        model(source.at[0, 0].set(12), target)
    with pytest.raises(UserError, match="id -1 is outside the vocabulary of 12"):
        model(source, target.at[0, 1].set(-1))
    # A compiled function cannot raise; it must not pass off another word's vector either.
    assert bool(jnp.isnan(tiny.forward(model, source.at[0, 0].set(12), target)[0]).all())


def test_batches_that_differ_are_named():
    model = tiny.make()
    with pytest.raises(ValueError, match="memory has batch 4 but the target has batch 2"):
        model(tiny.pairs()[0], tiny.pairs(rows=2)[1])


def packed_pairs():
    """Two rows that hold two pairs and one pair; and the pairs apart."""
    source, target = tiny.pairs(rows=3, source_length=5, target_length=4)
    pairs = [
        (row[row != tiny.PAD], goal[goal != tiny.PAD])
        for row, goal in zip(np.asarray(source), np.asarray(target), strict=True)
    ]
    arrays = [np.full((2, 10), tiny.PAD), np.full((2, 9), tiny.PAD), np.zeros((2, 10), int), np.zeros((2, 9), int)]
    places = []
    for row, members in enumerate(([0, 1], [2])):
        filled = [0, 0]
        for segment, member in enumerate(members, 1):
            places.append((row, filled[1], filled[1] + len(pairs[member][1])))
            for side, ids in enumerate(pairs[member]):
                span = slice(filled[side], filled[side] + len(ids))
                arrays[side][row, span], arrays[side + 2][row, span] = ids, segment
                filled[side] = span.stop
    return pairs, places, *map(jnp.asarray, arrays)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_packed_pairs_have_the_logits_that_they_have_alone(positions):
    model = tiny.make(replace(tiny.CONFIG, positions=positions))
    pairs, places, source, target, *segments = packed_pairs()
    packed = tiny.forward(model, source, target, segments=tuple(segments))
    for (a, b), (row, begin, end) in zip(pairs, places, strict=True):
        alone = tiny.forward(model, jnp.asarray(a)[None], jnp.asarray(b)[None])
        np.testing.assert_allclose(packed[row, begin:end], alone[0], atol=1e-5)


def test_packed_pairs_have_no_influence_on_each_other():
    # Every position has an id of its own and every side a table of its own: a table's gradient tells whose influence.
    model = tiny.make(replace(tiny.CONFIG, vocab_size=30, tie_embeddings="none"))
    source, target = jnp.arange(10, 20)[None], jnp.arange(20, 28)[None]
    segments = jnp.array([[1] * 4 + [2] * 6]), jnp.array([[1] * 3 + [2] * 5])

    def logits_of_first(model):
        return model(source, target, segments=segments)[0, :3]

    influence = jax.jit(jax.jacrev(logits_of_first))(model)
    by_source, by_target = (
        np.abs(table[...]).sum(axis=(0, 1, 3))
        for table in (influence.embedding.table, influence.target_embedding.table)
    )
    assert (by_source[10:14] > 0).all() and (by_target[20:23] > 0).all()
    assert (by_source[14:] == 0).all() and (by_target[23:] == 0).all()
