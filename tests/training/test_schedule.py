import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.training import OptimizerConfig
from transformer_jax.training.schedule import cosine, inverse_square_root, linear


def values(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_the_papers_first_ten_values_its_peak_and_its_fall():
    rate = inverse_square_root(512, 4000)
    expected = [512**-0.5 * min(n**-0.5, n * 4000**-1.5) for n in range(1, 11)]
    np.testing.assert_allclose(values(rate, range(10)), expected, rtol=1e-6)
    assert values(rate, [0])[0] == pytest.approx(1.7469281e-07)
    assert values(rate, [3999])[0] == pytest.approx((512 * 4000) ** -0.5)
    assert values(rate, [15_999])[0] == pytest.approx((512 * 16_000) ** -0.5)
    assert values(inverse_square_root(512, 4000, scale=2.0), [7])[0] == pytest.approx(2 * expected[7])


def test_cosine_and_linear():
    for schedule, middle in ((cosine(1.0, 10, 110), 0.5), (linear(1.0, 10, 110), 0.5)):
        np.testing.assert_allclose(values(schedule, range(10)), [n / 10 for n in range(1, 11)], rtol=1e-6)
        np.testing.assert_allclose(values(schedule, [59, 109, 500]), [middle, 0, 0], atol=1e-6)
    assert values(cosine(1.0, 10, 110), [34])[0] == pytest.approx(0.5 * (1 + np.cos(np.pi / 4)))
    assert values(linear(1.0, 10, 110), [34])[0] == pytest.approx(0.75)
    assert values(cosine(2.0, 10, 110, final_fraction=0.1), [109])[0] == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["inverse_square_root", "cosine", "linear"])
def test_every_kind_can_be_configured(kind):
    config = OptimizerConfig(schedule=kind, warmup_steps=10, total_steps=100, peak=0.5)
    first = config.learning_rate(64)(jnp.int32(0))
    assert float(first) == pytest.approx(0.05 if kind != "inverse_square_root" else 64**-0.5 * 10**-1.5)


def test_mistakes_are_named():
    with pytest.raises(UserError, match="warmup_steps must be at least 1; got 0"):
        OptimizerConfig(warmup_steps=0)
    with pytest.raises(UserError, match="schedule='cosine' falls to zero at total_steps, which is None; set it"):
        OptimizerConfig(schedule="cosine").build(16)
