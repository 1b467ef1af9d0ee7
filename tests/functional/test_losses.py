import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import functional as F


def closed_form(logits, labels, weights, smoothing):
    logits = np.asarray(logits, np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    target = np.full(logits.shape, smoothing / logits.shape[-1])
    np.put_along_axis(target, labels[..., None], 1 - smoothing + smoothing / logits.shape[-1], axis=-1)
    return -(target * log_probabilities).sum(-1) @ weights, weights.sum()


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    logits = random.normal(size=(7, 11)).astype(np.float32) * 3
    return logits, random.integers(0, 11, 7), np.array([1, 1, 0, 1, 0, 1, 1], np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_is_the_entropy_of_the_smoothed_target(batch, smoothing):
    np.testing.assert_allclose(
        F.cross_entropy(*map(jnp.asarray, batch), label_smoothing=smoothing), closed_form(*batch, smoothing), rtol=1e-5
    )


def test_gradient_is_probability_minus_target(batch):
    logits, labels, weights = batch
    gradient = jax.grad(lambda x: F.cross_entropy(x, jnp.asarray(labels), weights, label_smoothing=0.1)[0])(logits)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    target = 0.9 * np.eye(11)[labels] + 0.1 / 11
    np.testing.assert_allclose(gradient, (probabilities - target) * weights[:, None], atol=1e-6)


def test_nothing_but_padding_weighs_nothing(batch):
    logits, labels, _ = batch
    (total, weight), gradient = jax.value_and_grad(
        lambda x: F.cross_entropy(x, jnp.asarray(labels), jnp.zeros(7), label_smoothing=0.1), has_aux=True
    )(logits)
    assert total == weight == 0
    np.testing.assert_array_equal(gradient, 0)


def test_low_precision_logits_are_summed_in_float32(batch):
    logits = jnp.asarray(batch[0], jnp.bfloat16)
    total, _ = F.cross_entropy(logits, *map(jnp.asarray, batch[1:]))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, closed_form(logits, *batch[1:], 0.0)[0], rtol=1e-5)


def test_huge_logits_have_the_loss_of_the_closed_form():
    total, _ = F.cross_entropy(jnp.array([[1e4, -1e4, 0.0]]), jnp.array([1]), label_smoothing=0.1)
    assert float(total) == pytest.approx(19_000)  # (0.9 + 0.1 / 3) * 20,000 + 0.1 / 3 * 10,000


def test_a_label_outside_the_vocabulary_is_not_clamped():
    total, _ = F.cross_entropy(jnp.zeros((1, 3)), jnp.array([3]))
    assert bool(jnp.isnan(total))


@pytest.mark.parametrize("label", [-1, -100, 5, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_label_outside_the_vocabulary_is_nan_or_not_counted(label, smoothing):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    labels = jnp.array([[0, label, 2], [4, 1, 3]])

    @jax.jit
    def loss(logits, weights):
        return F.cross_entropy(logits, labels, weights, label_smoothing=smoothing)

    total, _ = loss(logits, jnp.ones((2, 3)))
    assert jnp.isnan(total)
    weights = jnp.array([[1.0, 0.0, 2.0], [1.0, 1.0, 1.0]])
    total, weight = loss(logits, weights)
    in_range = F.cross_entropy(logits, labels.at[0, 1].set(0), weights, label_smoothing=smoothing)
    np.testing.assert_allclose((total, weight), in_range, rtol=1e-6)
    gradient = jax.grad(lambda logits: loss(logits, weights)[0])(logits)
    assert jnp.isfinite(gradient).all() and (gradient[0, 1] == 0).all()


@pytest.mark.parametrize(("dtype", "num_classes"), [(jnp.int8, 300), (jnp.int8, 256), (jnp.int16, 70_000)])
def test_narrow_labels_do_not_wrap(dtype, num_classes):
    total, _ = jax.jit(F.cross_entropy)(jnp.zeros((1, num_classes)), jnp.array([-1], dtype))
    assert jnp.isnan(total)


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_has_weight_zero_cannot_spoil_a_loss(wrong, dtype):
    logits = jax.random.normal(jax.random.key(0), (2, 4), dtype).at[1].set(wrong)
    labels, weights = jnp.array([1, 2]), jnp.array([True, False])
    (total, weight), gradient = jax.jit(
        jax.value_and_grad(lambda x: F.cross_entropy(x, labels, weights, label_smoothing=0.1), has_aux=True)
    )(logits)
    alone, _ = F.cross_entropy(logits[:1], labels[:1], label_smoothing=0.1)
    assert float(total) == pytest.approx(float(alone)) and weight == 1
    assert jnp.isfinite(gradient).all() and (gradient[1] == 0).all() and (gradient[0] != 0).any()
