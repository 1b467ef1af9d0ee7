import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import written_out
from transformer_jax import functional as F


def test_the_papers_sinusoids():
    encoding = F.sinusoidal(jnp.arange(50), 512)
    for position, feature in [(0, 0), (0, 1), (1, 0), (1, 1), (3, 2), (3, 3), (49, 510), (49, 511)]:
        angle = position / 10_000 ** ((feature - feature % 2) / 512)
        expected = math.cos(angle) if feature % 2 else math.sin(angle)
        assert encoding[position, feature] == pytest.approx(expected, abs=1e-5)


def test_golden_values_of_each_variant():
    at_one = {
        "interleaved": [0.841471, 0.540302, 0.099833, 0.995004, 0.010000, 0.999950, 0.001000, 1.000000],
        "halved": [0.841471, 0.099833, 0.010000, 0.001000, 0.540302, 0.995004, 0.999950, 1.000000],
        "tensor2tensor": [0.841471, 0.046399, 0.002154, 0.000100, 0.540302, 0.998923, 0.999998, 1.000000],
    }
    for variant, expected in at_one.items():
        np.testing.assert_allclose(F.sinusoidal(jnp.array([1]), 8, variant=variant)[0], expected, atol=1e-6)
        started = F.sinusoidal(jnp.array([0]), 8, variant=variant, start=1)[0]
        np.testing.assert_allclose(started, expected, atol=1e-6)


@pytest.mark.parametrize("variant", ["interleaved", "halved", "tensor2tensor"])
def test_moving_on_by_k_is_one_linear_map_wherever_one_stands(variant):
    size, half = 16, 8
    frequencies = 10_000.0 ** (-np.arange(half) / (half - 1 if variant == "tensor2tensor" else half))
    sines = np.arange(half) * 2 if variant == "interleaved" else np.arange(half)
    cosines = sines + 1 if variant == "interleaved" else sines + half
    encoding = np.asarray(F.sinusoidal(jnp.arange(100), size, variant=variant))
    for k in (1, 7, 30):
        move = np.zeros((size, size))
        move[sines, sines] = move[cosines, cosines] = np.cos(k * frequencies)
        move[sines, cosines], move[cosines, sines] = np.sin(k * frequencies), -np.sin(k * frequencies)
        np.testing.assert_allclose(encoding[:-k] @ move.T, encoding[k:], atol=2e-5)


@pytest.mark.parametrize("variant", ["interleaved", "halved"])
def test_rotary_turns_pairs_and_keeps_only_the_distance(variant):
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))

    def score(i, j):
        turned = [F.rotary(x, jnp.array([[p]]), variant=variant) for x, p in ((query, i), (key, j))]
        return jnp.einsum("BTNH,BTNH->N", *turned)

    np.testing.assert_allclose(score(3, 1), score(103, 101), rtol=1e-4)
    assert not np.allclose(score(3, 1), score(3, 2), rtol=1e-2)
    np.testing.assert_array_equal(F.rotary(query, jnp.zeros((1, 1), jnp.int32), variant=variant), query)
    pair = (0, 1) if variant == "interleaved" else (0, 4)
    one = jnp.zeros((1, 1, 1, 8)).at[..., pair[0]].set(1)
    turned = F.rotary(one, jnp.array([[2]]), variant=variant)[0, 0, 0]
    np.testing.assert_allclose(turned[jnp.array(pair)], [math.cos(2), math.sin(2)], atol=1e-6)


def test_rotary_pairs_turn_ever_more_slowly():
    np.testing.assert_allclose(F.rotary_frequencies(8, base=10_000.0), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    np.testing.assert_allclose(F.rotary_frequencies(4, base=100.0), [1, 0.1], rtol=1e-6)
    # At position 3 the second of two pairs has turned by 3 * 0.1.
    turned = F.rotary(jnp.array([[[[0.0, 1.0, 0.0, 0.0]]]]), jnp.array([[3]]), base=100.0)[0, 0, 0]
    np.testing.assert_allclose(turned, [0, math.cos(0.3), 0, math.sin(0.3)], atol=1e-6)


def test_linear_scaling_is_reading_at_a_slower_pace():
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 8))
    slow = F.rotary(x, jnp.array([[0, 8, 20]]), scaling=F.RotaryScaling("linear", 4.0))
    np.testing.assert_allclose(slow, F.rotary(x, jnp.array([[0, 2, 5]])), atol=1e-5)


def test_llama_slows_down_the_slow_pairs_only():
    """By wavelengths, as Llama 3.1 says it: up to 8192 / 4 positions as ever, from 8192 on eight times as long."""
    plain = np.asarray(F.rotary_frequencies(128, base=500_000.0), np.float64)
    scaling = F.RotaryScaling("llama3", 8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192)
    scaled = np.asarray(F.rotary_frequencies(128, base=500_000.0, scaling=scaling))
    kinds = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength <= 2048:
            kind, expected = "fast", before
        elif wavelength >= 8192:
            kind, expected = "slow", before / 8
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            kind, expected = "between", (1 - share) * before / 8 + share * before
        kinds.add(kind)
        assert after == pytest.approx(expected, rel=1e-4)
    assert kinds == {"fast", "between", "slow"}


def test_alibi_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(F.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(F.alibi_slopes(1), [2.0**-8])
    twelve = [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    np.testing.assert_allclose(F.alibi_slopes(12), twelve, rtol=1e-6)
    np.testing.assert_allclose(F.alibi_bias(2, 1, 3)[0, :, 0], [[-0.125, -0.0625, 0], [-0.0078125, -0.00390625, 0]])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="d_model=7 is odd"):
        F.sinusoidal(jnp.arange(3), 7)
    with pytest.raises(ValueError, match="variant='fairseq' is unknown"):
        F.sinusoidal(jnp.arange(3), 8, variant="fairseq")
    with pytest.raises(ValueError, match="head size 3 is odd"):
        F.rotary(jnp.ones((1, 1, 1, 3)), jnp.zeros((1, 1), jnp.int32))


def test_positions_begin_anew_with_each_segment():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [4, 5, 4, 4, 0, 0, 0, 1]])
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 0, 1, 2, 0]]
    assert F.segment_positions(segments).tolist() == expected


# Where each bucket of T5's 32 begins, up to distance 128: by hand, 8 * 2^(k/2) and 16 * 2^(3k/16), rounded up.
TWO_SIDED = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
ONE_SIDED = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


@pytest.mark.parametrize("compiled", [False, True])
def test_buckets_of_t5(compiled):
    buckets = partial(F.relative_buckets, num_buckets=32, max_distance=128)
    two_sided, one_sided = (partial(buckets, two_sided=two_sided) for two_sided in (True, False))
    if compiled:
        two_sided, one_sided = jax.jit(two_sided), jax.jit(one_sided)
    some = jnp.array([-1000, -128, -127, -64, -32, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 32, 64, 127, 128, 1000])
    behind, ahead = [15, 15, 15, 14, 12, 10, 9, 8, 7, 1], [17, 23, 24, 25, 26, 28, 30, 31, 31, 31]
    assert two_sided(some).tolist() == [*behind, 0, *ahead]
    assert one_sided(some).tolist() == [31, 31, 31, 26, 21, 16, 15, 8, 7, 1, 0] + [0] * 10
    # Logarithms that round would put 16, 32 and 64, where a bucket begins, into the one before.
    distances = np.arange(1, 1001, dtype=np.int32)
    assert two_sided(-distances).tolist() == (np.searchsorted(TWO_SIDED, distances, "right") - 1).tolist()
    assert two_sided(distances).tolist() == (np.searchsorted(TWO_SIDED, distances, "right") + 15).tolist()
    assert one_sided(-distances).tolist() == (np.searchsorted(ONE_SIDED, distances, "right") - 1).tolist()
    assert not one_sided(distances).any()


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 10), (16, 128), (32, 64), (64, 256)])
@pytest.mark.parametrize("two_sided", [False, True])
def test_buckets_are_those_that_integers_give(num_buckets, max_distance, two_sided):
    options = {"num_buckets": num_buckets, "max_distance": max_distance, "two_sided": two_sided}
    ahead = np.arange(-300, 301)
    given = jax.jit(partial(F.relative_buckets, **options))(ahead)
    assert given.tolist() == [written_out.bucket(int(distance), **options) for distance in ahead]
    assert given.min() == 0 and given.max() == num_buckets - 1
