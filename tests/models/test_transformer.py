from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import tiny
from tests.models import reference
from tests.models.weights import abstract, count, drops, filled, large, named
from transformer_jax.errors import UserError
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import Transformer, TransformerConfig
from transformer_jax.training import decays


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
    flat = {name: value.astype(np.float64) for name, value in large(config).items()}

    def blocks(side):
        prefix = f"{side}/blocks/"
        return {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}

    weights = {"table": flat["embedding/table"], "encoder": blocks("encoder"), "decoder": blocks("decoder")}
    if norm == "pre":
        for side in ("encoder", "decoder"):
            weights[f"{side}_norm"] = flat[f"{side}_norm/scale"], flat[f"{side}_norm/bias"]
    source, target = tiny.pairs(rows=1)
    expected = reference.transformer(weights, config, source[0], target[0])
    np.testing.assert_allclose(tiny.forward(filled(config), source, target)[0], expected, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing():
    model = filled(tiny.CONFIG)
    source, target = map(np.asarray, tiny.pairs())
    logits = tiny.forward(model, source, target)
    length = target.shape[1]
    for extra in (1, 7, 64):
        padded = [np.pad(ids, ((0, 0), (0, extra)), constant_values=tiny.PAD) for ids in (source, target)]
        np.testing.assert_allclose(tiny.forward(model, *padded)[:, :length], logits, atol=1e-5)
    words = [ids[3:, : (ids[3] != tiny.PAD).sum()] for ids in (source, target)]
    alone = tiny.forward(model, *words)
    np.testing.assert_allclose(alone[0], logits[3, : words[1].shape[1]], atol=1e-5)


def test_no_logit_depends_on_a_later_target_token():
    model = filled(tiny.CONFIG)
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
    decayed = {name for name, decay in named(decays(abstract(config))).items() if decay}
    attention = [f"{part}/weight" for part in ("query", "key", "value", "output")]
    assert decayed == {
        "embedding/table",
        "target_embedding/table",
        "lm_head/output/table",
        *(f"encoder/blocks/self_attention/{name}" for name in attention),
        *(f"decoder/blocks/{kind}_attention/{name}" for kind in ("self", "cross") for name in attention),
        *(f"{side}/blocks/feed_forward/{way}/weight" for side in ("encoder", "decoder") for way in ("input", "output")),
    }


def test_bfloat16_computation_stays_near_float32():
    source, target = tiny.pairs()
    model = filled(tiny.CONFIG)
    narrow = filled(replace(tiny.CONFIG, dtype="bfloat16"))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(abstract(narrow.config)))
    logits = tiny.forward(narrow, source, target)
    assert logits.dtype == jnp.float32
    expected = tiny.forward(model, source, target)
    assert 0 < np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


def test_attention_weights_are_those_of_the_pass():
    model = filled(tiny.CONFIG)
    source, target = tiny.pairs()
    weights = jax.jit(Transformer.attention)(model, source, target)
    w = large(tiny.CONFIG)
    x = reference.embed(w["embedding/table"], source[0])
    query, key = (
        np.einsum("TD,DNH->NTH", x, w[f"encoder/blocks/self_attention/{part}/weight"][0])
        + w[f"encoder/blocks/self_attention/{part}/bias"][0][:, None]
        for part in ("query", "key")
    )
    powers = np.exp(query @ key.swapaxes(1, 2) / np.sqrt(8))
    np.testing.assert_allclose(weights.encoder[0, 0], powers / powers.sum(-1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(weights.cross.sum(-1), 1, rtol=1e-5)
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
        ({"positions": "learned", "position_start": 1}, "position_start=1 are of sinusoidal positions; leave them out"),
        ({"positions": "learned", "sinusoids": "halved"}, "sinusoids='halved' and .* leave them out with learned ones"),
        ({"source_vocab_size": 20}, 'a source with a vocabulary of its own cannot share .* tie_embeddings="target"'),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(tiny.CONFIG, **changes)


def test_ids_outside_the_vocabulary():
    model = filled(tiny.CONFIG)
    source, target = tiny.pairs()
    with pytest.raises(ValueError, match="id 12 is outside the vocabulary of 12"):
        model(source.at[0, 0].set(12), target)
    with pytest.raises(ValueError, match="id -1 is outside the vocabulary of 12"):
        model(source, target.at[0, 1].set(-1))
    learned = filled(replace(tiny.CONFIG, positions="learned", max_length=5))
    for call in (learned, partial(tiny.forward, learned)):
        with pytest.raises(ValueError, match="position 5 is outside the table of 5"):
            call(source, target)
    # A compiled function cannot raise; it must not pass off another word's vector either.
    assert bool(jnp.isnan(tiny.forward(model, source.at[0, 0].set(12), target)[0]).all())


def test_batches_that_differ_are_named():
    model = filled(tiny.CONFIG)
    with pytest.raises(ValueError, match="memory has batch 4 but the target has batch 2"):
        model(tiny.pairs()[0], tiny.pairs(rows=2)[1])


def packed_pairs():
    """Three pairs, each alone in a row; where they are in rows of two, one and none; these rows, and their segments."""
    source, target = tiny.pairs(rows=3, source_length=5, target_length=4)
    pairs = [
        (row[row != tiny.PAD], goal[goal != tiny.PAD])
        for row, goal in zip(np.asarray(source), np.asarray(target), strict=True)
    ]
    arrays = [np.full((3, 10), tiny.PAD), np.full((3, 9), tiny.PAD), np.zeros((3, 10), int), np.zeros((3, 9), int)]
    places = []
    for row, members in enumerate(([0, 1], [2])):
        filled = [0, 0]
        for segment, member in enumerate(members, 1):
            places.append((row, filled[1], filled[1] + len(pairs[member][1])))
            for side, ids in enumerate(pairs[member]):
                span = slice(filled[side], filled[side] + len(ids))
                arrays[side][row, span], arrays[side + 2][row, span] = ids, segment
                filled[side] = span.stop
    alone = np.full((3, 10), tiny.PAD), np.full((3, 9), tiny.PAD)
    for member, pair in enumerate(pairs):
        for side, ids in enumerate(pair):
            alone[side][member, : len(ids)] = ids
    return alone, places, *arrays


def test_packed_pairs_have_the_logits_that_they_have_alone():
    model = filled(tiny.CONFIG)
    alone, places, source, target, *segments = packed_pairs()
    packed, expected = tiny.forward(model, source, target, segments=tuple(segments)), tiny.forward(model, *alone)
    for member, (row, begin, end) in enumerate(places):
        np.testing.assert_allclose(packed[row, begin:end], expected[member, : end - begin], atol=1e-5)


def test_packed_pairs_have_no_influence_on_each_other():
    # Every position has an id of its own and every side a table of its own: a table's gradient tells whose influence.
    model = filled(replace(tiny.CONFIG, vocab_size=30, tie_embeddings="none", positions="learned"))
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
    # Positions count from the beginning of each pair, and all tables learn.
    for table, length in ((influence.source_positions.table, 4), (influence.target_positions.table, 3)):
        assert (np.abs(table[...]).sum(axis=(0, 1, 3)) > 0).tolist() == [True] * length + [False] * (24 - length)
    assert bool(jnp.any(influence.lm_head.output.table[...] != 0))


def test_dropout_has_three_rates():
    config = replace(tiny.CONFIG, dropout_rate=0.1, attention_dropout_rate=0.2, activation_dropout_rate=0.3)
    assert drops(Transformer.__call__, config, *tiny.pairs()) == {
        # What is embedded, and what each sub-layer gives, of a source of 6 and a target of 5.
        **{((6, 16), 0.1): 1 + 2, ((5, 16), 0.1): 1 + 3},
        **{((2, 6, 6), 0.2): 1, ((2, 5, 5), 0.2): 1, ((2, 5, 6), 0.2): 1},
        **{((6, 32), 0.3): 1, ((5, 32), 0.3): 1},
    }
    assert set(drops(Transformer.__call__, tiny.CONFIG, *tiny.pairs())) == {((6, 16), 0.1), ((5, 16), 0.1)}


def test_the_first_position_of_each_kind_of_sinusoids():
    """At 2 and 3, with frequencies 1 and 1/100: of d_model = 4, where tensor2tensor's are 1 and 1/10000."""
    config = replace(tiny.CONFIG, d_model=4, scale_embedding=False, position_start=2)
    source = np.array([[4, 5]])
    expected = {
        "interleaved": [[0.909297, -0.416147, 0.019999, 0.999800], [0.141120, -0.989992, 0.029996, 0.999550]],
        "halved": [[0.909297, 0.019999, -0.416147, 0.999800], [0.141120, 0.029996, -0.989992, 0.999550]],
        "tensor2tensor": [[0.909297, 0.000200, -0.416147, 1.000000], [0.141120, 0.000300, -0.989992, 1.000000]],
    }
    for variant, encoding in expected.items():
        model = filled(replace(config, sinusoids=variant))
        table = np.asarray(model.embedding.table[...])
        for side in ("source", "target"):
            np.testing.assert_allclose(model._embed(source, side=side)[0], table[[4, 5]] + encoding, atol=1e-5)
        later = model._embed(source[:, 1:], side="target", start=1)[0]
        np.testing.assert_allclose(later, table[[5]] + encoding[1:], atol=1e-5)
    scaled = filled(replace(config, scale_embedding=True))._embed(source, side="source")[0]
    np.testing.assert_allclose(scaled, 2 * table[[4, 5]] + expected["interleaved"], atol=1e-5)


def test_tied_tables_are_one_table_used_in_several_places():
    source, target = tiny.pairs()
    untied = replace(tiny.CONFIG, tie_embeddings="none")
    weights = large(untied)
    weights["lm_head/output/table"] = weights["target_embedding/table"]
    like_target = tiny.forward(filled(untied, weights), source, target)
    given = tiny.forward(filled(replace(tiny.CONFIG, tie_embeddings="target"), weights), source, target)
    np.testing.assert_allclose(given, like_target, atol=1e-5)
    weights["lm_head/output/table"] = weights["target_embedding/table"] = weights["embedding/table"]
    like_all = tiny.forward(filled(untied, weights), source, target)
    np.testing.assert_allclose(tiny.forward(filled(tiny.CONFIG, weights), source, target), like_all, atol=1e-5)
    assert not np.allclose(like_target, like_all, atol=0.1)


def test_a_source_of_another_vocabulary_and_a_bias_for_each_word():
    config = replace(tiny.CONFIG, tie_embeddings="target", source_vocab_size=20, output_bias=True)
    source, target = tiny.pairs()
    source = np.where(source == 11, 19, source)
    assert set(named(abstract(config))) - set(named(abstract(tiny.CONFIG))) == {
        "target_embedding/table",
        "lm_head/bias",
    }
    assert named(decays(abstract(config)))["lm_head/bias"] is False
    weights = large(config)
    biased = tiny.forward(filled(config, weights), source, target)
    plain = tiny.forward(filled(config, weights | {"lm_head/bias": np.zeros(tiny.VOCAB)}), source, target)
    assert biased.shape == (*target.shape, tiny.VOCAB) and np.isfinite(biased).all()
    difference = np.broadcast_to(weights["lm_head/bias"], biased.shape)
    np.testing.assert_allclose(biased - plain, difference, atol=1e-5)
    with pytest.raises(ValueError, match="id 20 is outside the vocabulary of 20"):
        filled(config, weights)(source + 1, target)


EXPERTS = replace(
    tiny.CONFIG, experts=ExpertsConfig(4, capacity_factor=None, balance_weight=0.5, logit_weight=0.25), norm="pre"
)


@jax.jit
def run_experts(model, *pair, segments=None):
    x, balance = model.hidden_and_balance(*pair, segments=segments)
    return model.logits(x), balance


def test_one_expert_is_no_experts():
    one = replace(tiny.CONFIG, experts=ExpertsConfig(1, num_chosen=1, capacity_factor=None))
    weights = large(one)
    plain = dict(weights)
    for side in ("encoder", "decoder"):
        for ours, theirs in (("input", "in"), ("output", "out")):
            for part in ("weight", "bias"):
                expert = weights[f"{side}/blocks/feed_forward/{part}_{theirs}"]
                plain[f"{side}/blocks/feed_forward/{ours}/{part}"] = expert[:, 0]
    pair = tiny.pairs()
    logits, balance = run_experts(filled(tiny.CONFIG, plain), *pair)
    with_expert, with_balance = run_experts(filled(one, weights), *pair)
    # Padding is passed over by the expert, and has no say in any logit of a token.
    tokens = np.asarray(pair[1] != tiny.PAD)
    np.testing.assert_allclose(with_expert[tokens], logits[tokens], atol=2e-5)
    assert balance == 0 and with_balance > 0


def test_experts_know_no_neighbours_and_cost_what_their_tokens_weigh():
    alone, places, source, target, *segments = packed_pairs()
    packed, _ = run_experts(filled(EXPERTS), source, target, segments=tuple(segments))
    expected, _ = run_experts(filled(EXPERTS), *alone, segments=tuple((ids != tiny.PAD).astype(int) for ids in alone))
    for member, (row, begin, end) in enumerate(places):
        np.testing.assert_allclose(packed[row, begin:end], expected[member, : end - begin], atol=2e-5)
    weights = large(EXPERTS)
    for side in ("encoder", "decoder"):
        weights[f"{side}/blocks/feed_forward/router"] *= 0
    _, balance = run_experts(filled(EXPERTS, weights), source, target, segments=tuple(segments))
    # Of each token in each of two layers: E * sum f P = 1, and logsumexp(0, 0, 0, 0) = log 4.
    num_tokens = int((source != tiny.PAD).sum() + (target != tiny.PAD).sum())
    assert balance == pytest.approx(2 * num_tokens * (0.5 + 0.25 * np.log(4) ** 2), rel=1e-5)


def test_padding_takes_no_room_at_the_experts_of_an_encoder():
    model = filled(replace(EXPERTS, experts=replace(EXPERTS.experts, capacity_factor=0.5)))
    source, _ = tiny.pairs()
    together = jax.jit(Transformer.encode)(model, source)
    for row in range(1, 4):
        length = source.shape[1] - row
        alone = jax.jit(Transformer.encode)(model, source[row : row + 1, :length])
        np.testing.assert_allclose(together[row, :length], alone[0], atol=2e-5)


def test_the_axis_of_experts_is_named():
    feed_forward = abstract(EXPERTS).encoder.blocks.feed_forward
    assert feed_forward.weight_in.axes == ("layers", "experts", "embed", "ff")
    assert feed_forward.router.axes == ("layers", "embed", "experts")
