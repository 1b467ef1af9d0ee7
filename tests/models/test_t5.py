from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import written_out
from tests.models.weights import abstract, activate, count, drawn, drops, filled, first_block, large, named, program
from transformer_jax.errors import UserError
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import T5, T5Config
from transformer_jax.training import decays

PAD, VOCAB, ROWS, SOURCE, TARGET = 1, 15, 3, 9, 10

FIRST = replace(
    T5Config.small(VOCAB, pad_id=PAD),
    d_model=12,
    num_heads=2,
    head_size=5,
    d_ff=18,
    num_encoder_layers=2,
    num_decoder_layers=3,
    num_buckets=8,
    max_distance=10,
    dtype="float32",
)
SECOND = FIRST.v1_1(d_ff=14)
VERSIONS = {"first": FIRST, "second": SECOND}
EXPERTS = replace(
    SECOND, experts=ExpertsConfig(4, num_chosen=1, capacity_factor=None, balance_weight=0.5, logit_weight=0.25)
)
# The bucket of each distance of FIRST: the encoder's to keys behind and ahead, and the decoder's.
BEHIND, AHEAD, ONE_SIDED = [0, 1, 2, 2, 2, 3, 3, 3, 3], [0, 5, 6, 6, 6, 7, 7, 7, 7], [0, 1, 2, 3, 4, 4, 5, 6, 7, 7]

forward = jax.jit(T5.__call__)
attention = jax.jit(T5.attention)
start = partial(jax.jit, static_argnames="length")(T5.start)
decode = jax.jit(T5.decode)


@jax.jit
def run_experts(model, pair, segments):
    x, balance = model.hidden_and_balance(*pair, segments=segments)
    return model.logits(x), balance


@pytest.fixture
def pair():
    """Sources of 9, 7 and 5 tokens; targets of 10, 8 and 10 that begin with the padding id."""
    random = np.random.default_rng(0)
    source, target = random.integers(PAD + 1, VOCAB, (ROWS, SOURCE)), random.integers(PAD + 1, VOCAB, (ROWS, TARGET))
    target[:, 0] = source[1, 7:] = source[2, 5:] = target[1, 8:] = PAD
    return source, target


def packed_pairs():
    """A row of two pairs and a row of one, with their segments; and each pair alone in a row, with its place."""
    source = np.array([[5, 6, 7, 8, 9, 10, 11, PAD, PAD], [12, 13, 14, 2, PAD, PAD, PAD, PAD, PAD]])
    target = np.array([[PAD, 6, 7, PAD, 9, 10, 11, 12, PAD, PAD], [PAD, 3, 4, 5, 6, 7, PAD, PAD, PAD, PAD]])
    segments = (
        np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0]]),
        np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]),
    )
    alone = (
        np.array([[5, 6, 7] + [PAD] * 6, [8, 9, 10, 11] + [PAD] * 5, [12, 13, 14, 2] + [PAD] * 5]),
        np.array([[PAD, 6, 7] + [PAD] * 7, [PAD, 9, 10, 11, 12] + [PAD] * 5, [PAD, 3, 4, 5, 6, 7] + [PAD] * 4]),
    )
    return (source, target), segments, alone, [(0, 0, 3), (0, 3, 8), (1, 0, 6)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (T5Config.small(), 60_506_624),
        (T5Config.base(), 222_903_552),
        (T5Config.base().v1_1(d_ff=2048), 247_577_856),
        # T5 v1.1 small has other heads and layers than the first.
        (
            replace(T5Config.small(), num_heads=6, num_encoder_layers=8, num_decoder_layers=8).v1_1(d_ff=1024),
            76_961_152,
        ),
    ],
)
def test_published_parameter_counts(config, expected):
    assert count(config) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_agrees_with_the_papers_written_out_in_numpy(version, pair):
    config, (source, target) = VERSIONS[version], pair
    logits = forward(filled(config), source, target)
    for row in range(ROWS):
        expected, *_ = written_out.t5(large(config), config, source[row], target[row])
        np.testing.assert_allclose(logits[row], expected, atol=5e-5)


def test_attention_weights_are_those_of_the_pass(pair):
    source, target = pair
    weights = attention(filled(FIRST), source, target)
    for row in range(ROWS):
        _, *expected = written_out.t5(large(FIRST), FIRST, source[row], target[row])
        for given, seen in zip(weights, expected, strict=True):
            np.testing.assert_allclose(given[:, row], seen, atol=2e-5)


def test_where_contents_say_nothing_distances_do_in_each_layer_and_not_across(pair):
    source, target = pair
    weights = large(FIRST)
    for name in weights:
        if "query" in name:
            weights[name] = np.zeros_like(weights[name])
    given = attention(filled(FIRST, weights), source, target)

    def softmax_of_biases(side, size, bucket, seen):
        bias = [[weights[f"{side}/distance_bias"][bucket(s - t)] for s in range(size)] for t in range(size)]
        powers = np.exp(np.moveaxis(np.array(bias), -1, 0)) * seen
        return powers / powers.sum(-1, keepdims=True)

    for row, num_tokens in enumerate((9, 7, 5)):
        tokens = np.arange(SOURCE) < num_tokens
        two_sided = softmax_of_biases("encoder", SOURCE, lambda d: AHEAD[d] if d > 0 else BEHIND[-d], tokens)
        one_sided = softmax_of_biases("decoder", TARGET, lambda d: ONE_SIDED[max(-d, 0)], np.tri(TARGET))
        for layer in given.encoder[:, row]:
            np.testing.assert_allclose(layer, two_sided, atol=1e-6)
        for layer in given.decoder[:, row]:
            np.testing.assert_allclose(layer, one_sided, atol=1e-6)
        even = np.broadcast_to(tokens / num_tokens, (3, 2, TARGET, SOURCE))
        np.testing.assert_allclose(given.cross[:, row], even, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sizes", [(1,) * 10, (3, 1, 3, 3), (3, 3, 3, 1)])
def test_cached_equals_uncached_at_every_position_and_prompt_length(version, sizes, pair):
    model, (source, target) = filled(VERSIONS[version]), pair
    state, pieces, place = start(model, source, length=TARGET + 2), [], 0
    for size in sizes:
        logits, state = decode(model, target[:, place : place + size], state)
        pieces.append(logits)
        place += size
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), forward(model, *pair), atol=5e-5)


@pytest.mark.parametrize("extra", [1, 7])
def test_padding_changes_nothing(pair, extra):
    model = filled(FIRST)
    padded = [np.pad(ids, ((0, 0), (0, extra)), constant_values=PAD) for ids in pair]
    np.testing.assert_allclose(forward(model, *padded)[:, :TARGET], forward(model, *pair), atol=5e-5)


def test_no_logit_depends_on_a_later_target_token(pair):
    model, (source, target) = filled(SECOND), pair
    before, changed = forward(model, *pair), target.copy()
    changed[:, 4] = PAD + 1 + (target[:, 4] - PAD) % (VOCAB - 2)
    after = forward(model, source, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (np.abs(before - after)[:, 4:].max(-1) > 1e-4).all()


def test_packed_pairs_have_the_logits_that_they_have_alone():
    model = filled(FIRST)
    pairs, segments, alone, places = packed_pairs()
    packed, expected = forward(model, *pairs, segments=segments), forward(model, *alone)
    for member, (row, begin, end) in enumerate(places):
        np.testing.assert_allclose(packed[row, begin:end], expected[member, : end - begin], atol=5e-5)
    others = [np.where(of == 1, ids, 14) for ids, of in zip(pairs, segments, strict=True)]
    np.testing.assert_array_equal(forward(model, *others, segments=segments)[0, :3], packed[0, :3])


def test_deviations_at_the_start():
    sizes = {"d_model": 64, "num_heads": 6, "head_size": 16, "num_buckets": 64, "max_distance": 128}
    config = replace(FIRST, vocab_size=400, **sizes).v1_1(d_ff=200)
    expected = {
        "embedding/table": 1,
        "lm_head/output/table": 64**-0.5,
        "query/weight": 64**-0.5 * 16**-0.5,
        "key/weight": 64**-0.5,
        "value/weight": 64**-0.5,
        "attention/output/weight": (6 * 16) ** -0.5,
        "feed_forward/input/weight": 64**-0.5,
        "feed_forward/gate/weight": 64**-0.5,
        "feed_forward/output/weight": 200**-0.5,
        "distance_bias": 64**-0.5,
    }
    for name, value in named(drawn(config)).items():
        if name.endswith("norm/scale"):
            np.testing.assert_array_equal(value, 1, err_msg=name)
        else:
            (deviation,) = (value for ending, value in expected.items() if name.endswith(ending))
            few = value.size < 1000
            assert value.std() == pytest.approx(deviation, rel=0.1 if few else 0.03), name


def test_activations_at_five_points():
    points = np.array([-3.0, -1.0, 0.0, 0.5, 2.0])
    first, second = (first_block(filled(config).encoder.layers).feed_forward for config in (FIRST, SECOND))
    np.testing.assert_allclose(activate(first, points), np.maximum(points, 0), atol=1e-6)
    tanh_gelu = [-0.00363739, -0.15880801, 0.0, 0.34571401, 1.95459769]
    np.testing.assert_allclose(activate(second, points), tanh_gelu * points, atol=1e-6)


def test_norms_of_small_numbers_show_their_epsilon():
    x = np.tile(np.array([2e-3, 0.0], np.float32), 6)[None, None]  # of mean square 2e-6
    plain = {name: np.full_like(value, float(name.endswith("scale"))) for name, value in large(FIRST).items()}
    model = filled(FIRST, plain)
    block = first_block(model.decoder.layers)
    residuals = block.self_attention_residual, block.cross_attention_residual, block.feed_forward_residual
    for norm in (model.encoder.norm, model.decoder.norm, *(residual.norm for residual in residuals)):
        np.testing.assert_allclose(norm(x)[0, 0, :2], [2 / 3**0.5, 0], rtol=1e-4)


def test_matrices_decay_and_nothing_else_does():
    decayed = {name for name, decay in named(decays(abstract(SECOND))).items() if decay}
    parts = {
        "encoder": ["self_attention"],
        "decoder": ["self_attention", "cross_attention"],
    }
    assert decayed == {
        "embedding/table",
        "lm_head/output/table",
        *(
            f"{side}/layers/blocks/{attention}/{part}/weight"
            for side, attentions in parts.items()
            for attention in attentions
            for part in ("query", "key", "value", "output")
        ),
        *(f"{side}/layers/blocks/feed_forward/{way}/weight" for side in parts for way in ("input", "gate", "output")),
    }


def test_bfloat16_computation_stays_near_float32(pair):
    logits = forward(filled(replace(FIRST, dtype="bfloat16")), *pair)
    expected = forward(filled(FIRST), *pair)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_ids_outside_the_vocabulary(pair):
    model, (source, target) = filled(FIRST), pair
    wrong = source.copy()
    wrong[0, 0] = VOCAB
    with pytest.raises(ValueError, match="id 15 is outside the vocabulary of 15"):
        model(wrong, target)
    logits = forward(model, wrong, target)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1:]).all()


def test_compiles_the_same_program_for_every_depth(pair):
    def lines(depth):
        return program(T5.__call__, replace(FIRST, num_encoder_layers=depth, num_decoder_layers=depth), *pair)

    assert lines(2) == lines(24)


def test_dropout_needs_keys_and_differs_between_rows(pair):
    model, same = filled(FIRST), [np.broadcast_to(ids[:1], ids.shape) for ids in pair]
    keys = jax.random.split(jax.random.key(0), 2)[np.array([0, 0, 1])]
    dropped, whole = forward(model, *same, dropout_key=keys), forward(model, *same)
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert (np.abs(dropped[0] - dropped[2]).max(-1) > 1e-2).all()
    assert not np.allclose(dropped[0], whole[0], atol=1e-2)


def test_dropout_is_everywhere(pair):
    """Before and after the layers, on each sub-layer's output, on the weights, inside the feed-forward network."""
    weights = [(2, SOURCE, SOURCE), (2, TARGET, TARGET), (2, TARGET, SOURCE)]
    once = dict.fromkeys([*weights, (SOURCE, 18), (TARGET, 18)], 1)
    expected = {(SOURCE, 12): 2 + 2, (TARGET, 12): 2 + 3, **once}
    assert drops(T5.__call__, FIRST, *pair) == {(shape, 0.1): times for shape, times in expected.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_buckets": 3}, "num_buckets=3 must be at least 4"),
        ({"max_distance": 4}, "max_distance=4 above half of it"),
        ({"head_size": 0}, "head_size must be at least 1; got 0"),
        ({"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1; got 1.0"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(FIRST, **changes)


@pytest.mark.parametrize("name", ["vocab_size", "pad_id"])
def test_a_vocabulary_must_be_known(name):
    with pytest.raises(UserError, match="vocab_size and pad_id come from the tokenizer; set both to make a model"):
        abstract(replace(FIRST, **{name: None}))


def test_without_experts_there_is_nothing_to_balance(pair):
    logits, balance = run_experts(filled(SECOND), pair, None)
    np.testing.assert_array_equal(logits, forward(filled(SECOND), *pair))
    assert balance == 0


def test_with_room_for_all_experts_know_no_neighbours():
    model = filled(EXPERTS)
    pairs, segments, alone, places = packed_pairs()
    packed, _ = run_experts(model, pairs, segments)
    expected, _ = run_experts(model, alone, None)
    for member, (row, begin, end) in enumerate(places):
        np.testing.assert_allclose(packed[row, begin:end], expected[member, : end - begin], atol=5e-5)


def test_an_even_router_costs_what_its_tokens_weigh():
    weights = large(EXPERTS)
    for side in ("encoder", "decoder"):
        weights[f"{side}/layers/blocks/feed_forward/router"] *= 0
    pairs, segments, alone, _ = packed_pairs()
    # 11 source tokens in 2 layers and 14 target tokens in 3, of which three are the padding id that a target begins
    # with. Of each: E * sum f P = 1, and logsumexp(0, 0, 0, 0) = log 4.
    expected = pytest.approx((2 * 11 + 3 * 14) * (0.5 + 0.25 * np.log(4) ** 2), rel=1e-5)
    assert run_experts(filled(EXPERTS, weights), pairs, segments)[1] == expected
    assert run_experts(filled(EXPERTS, weights), alone, None)[1] == expected
