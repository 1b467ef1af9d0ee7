from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import written_out
from tests.models.weights import abstract, activate, count, drawn, drops, filled, first_block, large, named, program
from transformer_jax.errors import UserError
from transformer_jax.functional import RotaryScaling
from transformer_jax.layers import ExpertsConfig
from transformer_jax.models import GPT, GPTConfig
from transformer_jax.training import decays

VOCAB, ROWS, LENGTH = 19, 3, 8

GPT2 = replace(GPTConfig.small(VOCAB), d_model=16, num_heads=2, d_ff=24, num_layers=2, max_length=15, dtype="float32")
LLAMA = replace(
    GPTConfig.llama(VOCAB),
    d_model=16,
    num_heads=4,
    num_key_heads=2,
    head_size=6,
    d_ff=20,
    num_layers=2,
    max_length=15,
    rotary_base=50.0,
    rotary_scaling=RotaryScaling("linear", 2.0),
    dtype="float32",
)
EXPERTS = replace(LLAMA, experts=ExpertsConfig(4, capacity_factor=None, balance_weight=0.5, logit_weight=0.25))
KINDS = {"learned": GPT2, "rotary": LLAMA}

forward = jax.jit(GPT.__call__)


@jax.jit
def run_experts(model, ids, valid, segments):
    x, balance = model.hidden_and_balance(ids, valid=valid, segments=segments)
    return model.logits(x), balance


decode = jax.jit(GPT.decode)


@pytest.fixture(params=KINDS)
def model(request):
    return filled(KINDS[request.param])


@pytest.fixture
def ids():
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTConfig.small(), 124_439_808),
        (GPTConfig.medium(), 354_823_168),
        (GPTConfig.large(), 774_030_080),
        (GPTConfig.xl(), 1_557_611_200),
        (GPTConfig.llama(), 6_738_415_616),
        # Llama 3.1 8B: four queries to a key.
        (replace(GPTConfig.llama(128_256), d_ff=14_336, num_key_heads=8), 8_030_261_248),
    ],
)
def test_published_parameter_counts(config, expected):
    assert count(config) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_papers_written_out_in_numpy(kind, ids):
    config, model = KINDS[kind], filled(KINDS[kind])
    logits = forward(model, ids)
    for row in range(ROWS):
        expected, _ = written_out.gpt(large(config), config, ids[row])
        np.testing.assert_allclose(logits[row], expected, atol=2e-5)


def test_attention_weights_are_those_of_the_pass(ids):
    weights = jax.jit(GPT.attention)(filled(LLAMA), ids)
    for row in range(ROWS):
        _, seen = written_out.gpt(large(LLAMA), LLAMA, ids[row])
        np.testing.assert_allclose(weights[:, row], seen, atol=1e-5)


def test_no_logit_depends_on_a_later_token_and_all_depend_on_every_earlier_one(model, ids):
    before = forward(model, ids)
    for place in range(LENGTH):
        after = forward(model, (ids + (np.arange(LENGTH)[None] == place)) % VOCAB)
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert (np.abs(before - after)[:, place:].max(-1) > 1e-4).all()


def run_in_pieces(model, ids, state, sizes):
    pieces, place = [], 0
    for size in sizes:
        logits, state = decode(model, ids[:, place : place + size], state)
        pieces.append(logits)
        place += size
    assert place == ids.shape[1] == state.position
    return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 1, 1, 3), (5, 3), (3, 5)])
def test_cached_equals_uncached_at_every_position_and_prompt_length(model, ids, sizes):
    logits = run_in_pieces(model, ids, model.start(ROWS, LENGTH + 1), sizes)
    np.testing.assert_allclose(logits, forward(model, ids), atol=2e-5)


def test_prompts_padded_on_the_left_are_continued_as_each_would_be_alone(model, ids):
    begins = np.array([0, 2, 4])
    logits = run_in_pieces(model, ids, model.start(ROWS, LENGTH + 1, begins), (5, 3))
    for row, begin in enumerate(begins.tolist()):
        alone = forward(model, np.roll(ids, -begin, axis=1))[row, : LENGTH - begin]
        np.testing.assert_allclose(logits[row, begin:], alone, atol=2e-5)


def test_a_full_cache_is_an_error():
    model, ids = filled(GPT2), np.ones((ROWS, LENGTH), int)
    with pytest.raises(ValueError, match="the cache holds 7 positions; 8 more do not fit"):
        decode(model, ids, model.start(ROWS, LENGTH - 1))
    fitting, full = (replace(model.start(ROWS, LENGTH + 1), position=jnp.int32(place)) for place in (6, 7))
    with pytest.raises(ValueError, match="the cache holds 9 positions; 3 more from position 7 do not fit"):
        model.decode(ids[:, :3], full)
    # A compiled function cannot raise; it must not write over what is there either.
    assert np.isnan(decode(model, ids[:, :3], full)[0]).all()
    assert np.isfinite(decode(model, ids[:, :3], fitting)[0]).all()


def test_packed_texts_have_the_logits_that_they_have_alone(model, ids):
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1]])
    packed = forward(model, ids, segments=segments)
    for row, begin, end in [(0, 0, 3), (0, 3, 7), (1, 0, 5), (1, 5, 6), (1, 6, 8), (2, 0, 8)]:
        alone = forward(model, np.roll(ids, -begin, axis=1))[row, : end - begin]
        np.testing.assert_allclose(packed[row, begin:end], alone, atol=2e-5)
        outside = (np.arange(LENGTH) < begin) | (np.arange(LENGTH) >= end)
        neighbours_changed = forward(model, np.where(outside[None], (ids + 1) % VOCAB, ids), segments=segments)
        np.testing.assert_array_equal(neighbours_changed[row, begin:end], packed[row, begin:end])


@pytest.mark.parametrize("extra", [1, 7])
def test_padding_on_either_side_changes_nothing(ids, extra):
    model = filled(GPT2)
    logits, width = forward(model, ids), LENGTH + extra
    for left in (0, extra):
        places = np.arange(width)[None] - left
        valid = np.broadcast_to((places >= 0) & (places < LENGTH), (ROWS, width))
        padded = np.pad(ids, ((0, 0), (left, extra - left)), constant_values=3)
        given = forward(model, padded, valid=valid, positions=np.maximum(places, 0))
        np.testing.assert_allclose(given[:, left : left + LENGTH], logits, atol=2e-5)


def test_shared_keys_are_keys_that_are_repeated(ids):
    weights = large(LLAMA)
    for part in ("key", "value"):
        name = f"decoder/blocks/self_attention/{part}/weight"
        weights[name] = np.repeat(weights[name], 2, axis=2)
    full = filled(replace(LLAMA, num_key_heads=None), weights)
    np.testing.assert_allclose(forward(full, ids), forward(filled(LLAMA), ids), atol=1e-5)
    assert filled(LLAMA).start(ROWS, 5).cache.key.shape == (2, ROWS, 5, 2, 6)


def test_rotary_positions_matter_by_their_distances_only(ids):
    model, places, hidden = filled(LLAMA), np.arange(LENGTH)[None], jax.jit(GPT.hidden)
    counted = hidden(model, ids, positions=places)
    np.testing.assert_allclose(hidden(model, ids, positions=places + 40), counted, atol=1e-4)
    assert not np.allclose(hidden(model, ids, positions=2 * places), counted, atol=0.1)
    np.testing.assert_allclose(counted @ model.lm_head.output.table[...].T, forward(model, ids), atol=2e-5)


def test_deviations_at_the_start():
    config = replace(GPTConfig.small(400), d_model=64, num_heads=4, d_ff=256, num_layers=3, max_length=128)
    weights = {name: np.asarray(leaf) for name, leaf in named(drawn(replace(config, tie_embeddings=False))).items()}
    for name, value in weights.items():
        if name.endswith(("bias", "scale")):
            np.testing.assert_array_equal(value, float(name.endswith("scale")), err_msg=name)
        else:
            residual = "output/weight" in name  # one of the 2L terms that are added up
            assert value.std() == pytest.approx(0.02 / 6**0.5 if residual else 0.02, rel=0.03), name
    first, second, _ = weights["decoder/blocks/self_attention/query/weight"]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def test_activations_at_five_points():
    points = [-3.0, -1.0, 0.0, 0.5, 2.0]
    tanh_gelu = [-0.00363739, -0.15880801, 0.0, 0.34571401, 1.95459769]
    np.testing.assert_allclose(activate(first_block(filled(GPT2).decoder).feed_forward, points), tanh_gelu, atol=1e-6)
    silu = np.array([-0.14227762, -0.26894142, 0.0, 0.31122967, 1.76159416])
    gated = activate(first_block(filled(LLAMA).decoder).feed_forward, points)
    np.testing.assert_allclose(gated, silu * points, atol=1e-6)


def test_norms_of_small_numbers_show_their_epsilon():
    x = np.tile(np.array([2e-3, 0.0], np.float32), 8)[None, None]
    # Of mean 1e-3, variance 1e-6, mean square 2e-6.
    expected = {"learned": [1 / 11**0.5, -1 / 11**0.5], "rotary": [2 / 3**0.5, 0.0]}
    for kind, config in KINDS.items():
        plain = {name: np.full_like(value, float(name.endswith("scale"))) for name, value in large(config).items()}
        model = filled(config, plain)
        block = first_block(model.decoder)
        for norm in (model.norm, block.self_attention_residual.norm, block.feed_forward_residual.norm):
            np.testing.assert_allclose(norm(x)[0, 0, :2], expected[kind], rtol=1e-4, atol=1e-7)


def test_matrices_decay_and_nothing_else_does():
    attention = {f"decoder/blocks/self_attention/{part}/weight" for part in ("query", "key", "value", "output")}
    expected = {
        "learned": {"embedding/table"}
        | attention
        | {f"decoder/blocks/feed_forward/{way}/weight" for way in ("input", "output")},
        "rotary": {"embedding/table", "lm_head/output/table"}
        | attention
        | {f"decoder/blocks/feed_forward/{way}/weight" for way in ("input", "gate", "output")},
    }
    for kind, config in KINDS.items():
        assert {name for name, decay in named(decays(abstract(config))).items() if decay} == expected[kind]


def test_bfloat16_computation_stays_near_float32(ids):
    narrow = filled(replace(LLAMA, dtype="bfloat16"))
    logits = forward(narrow, ids)
    assert logits.dtype == jnp.float32 and narrow.start(1, 1).cache.key.dtype == jnp.bfloat16
    expected = forward(filled(LLAMA), ids)
    assert 0 < np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


def test_ids_outside_the_vocabulary(ids):
    model, wrong = filled(GPT2), ids.copy()
    wrong[0, 0] = VOCAB
    with pytest.raises(ValueError, match="id 19 is outside the vocabulary of 19"):
        model(wrong)
    with pytest.raises(ValueError, match=r"position 15 is outside the table of 15 \(positions 0 to 14\)"):
        model(np.zeros((1, 16), int))
    with pytest.raises(ValueError, match="position 15 is outside"):
        forward(model, np.zeros((1, 16), int))
    logits = forward(model, wrong)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1:]).all()


def test_compiles_the_same_program_for_every_depth(ids):
    shallow, deep = (program(GPT.__call__, replace(LLAMA, num_layers=depth), ids) for depth in (2, 24))
    assert shallow == deep


def test_dropout_needs_keys_and_differs_between_rows(ids):
    model, same = filled(GPT2), np.broadcast_to(ids[:1], ids.shape)
    keys = jax.random.split(jax.random.key(0), 2)
    dropped = forward(model, same, dropout_key=keys[np.array([0, 0, 1])])
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert (np.abs(dropped[0] - dropped[2]).max(-1) > 1e-3).all()
    assert not np.allclose(dropped[0], forward(model, same)[0], atol=1e-3)


def test_dropout_is_on_what_is_embedded_what_a_sublayer_gives_and_the_weights(ids):
    config = replace(GPT2, dropout_rate=0.1, attention_dropout_rate=0.2)
    assert drops(GPT.__call__, config, ids) == {((LENGTH, 16), 0.1): 3, ((2, LENGTH, LENGTH), 0.2): 1}
    assert not drops(GPT.__call__, LLAMA, ids)


def test_a_state_can_be_multiplied():
    state = filled(LLAMA).start(2, 4, np.array([0, 3])).repeat(3)
    assert state.row_starts.tolist() == [0, 0, 0, 3, 3, 3] and state.cache.value.shape == (2, 6, 4, 2, 6)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPT2, {"num_heads": 3}, "num_heads=3 does not divide d_model=16; set num_heads to a divisor such as 2"),
        (GPT2, {"num_layers": 0}, "num_layers must be at least 1; got 0"),
        (GPT2, {"attention_dropout_rate": 1.0}, "attention_dropout_rate must be at least 0 and below 1; got 1.0"),
        (LLAMA, {"num_key_heads": 3}, "num_heads=4 is not a multiple of num_key_heads=3"),
        (LLAMA, {"head_size": 5}, "a head has 5 features; rotary positions need an even number"),
    ],
)
def test_impossible_configs_are_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        replace(config, **changes)


def test_a_vocabulary_must_be_known():
    with pytest.raises(UserError, match="vocab_size comes from the tokenizer; set it to make a model"):
        abstract(replace(GPT2, vocab_size=None))


def test_without_experts_there_is_nothing_to_balance(ids):
    logits, balance = run_experts(filled(LLAMA), ids, None, None)
    np.testing.assert_array_equal(logits, forward(filled(LLAMA), ids))
    assert balance == 0


def test_an_even_router_costs_what_its_tokens_weigh(ids):
    weights = large(EXPERTS) | {"decoder/blocks/feed_forward/router": np.zeros((2, 16, 4))}
    valid = np.arange(LENGTH)[None] < np.array([[8], [3], [1]])
    _, balance = run_experts(filled(EXPERTS, weights), ids, valid, np.ones_like(ids))
    # Of each of 2 layers and 12 tokens: E * sum f P = 1, and logsumexp(0, 0, 0, 0) = log 4.
    assert balance == pytest.approx(2 * 12 * (0.5 + 0.25 * np.log(4) ** 2), rel=1e-5)


def test_with_room_for_all_experts_know_no_neighbours_and_no_future(ids):
    model, valid = filled(EXPERTS), np.ones_like(ids, bool)
    alone, _ = run_experts(model, ids, valid, np.ones_like(ids))
    packed, _ = run_experts(model, ids, valid, np.array([[1, 1, 1, 2, 2, 2, 2, 2]] * ROWS))
    second, _ = run_experts(model, np.roll(ids, -3, axis=1), valid, np.ones_like(ids))
    np.testing.assert_allclose(packed, np.concatenate([alone[:, :3], second[:, :5]], axis=1), atol=2e-5)
    np.testing.assert_allclose(run_in_pieces(model, ids, model.start(ROWS, LENGTH), (1,) * 8), alone, atol=2e-5)
