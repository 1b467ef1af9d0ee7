"""Losses, each as a sum and a weight: divided once, when all devices and micro-batches are added up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*shape V"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"] | None = None,
    *,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum over positions of weight * H(q, softmax(logits)), and the sum of the weights.

    The target q is (1 - e) at the label plus e / V everywhere (Szegedy et al. 2016), so that
    H = logsumexp(x) - (1 - e) x_label - e mean(x): no array of log-probabilities is made.

    A position of weight 0 adds nothing to the loss, and the gradient of its logits is zero, whatever they and the label
    are: the label may be -100, as in other packages. Elsewhere a label outside 0..V-1 makes the loss NaN.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if weights is not None:
        # Of the logits and not of the loss: 0 times the derivative of a NaN would still be NaN.
        logits = jnp.where((weights != 0)[..., None], logits, 0)
        labels = jnp.where(weights != 0, labels, 0)
    picked = _pick(logits, labels)
    loss = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * jnp.mean(logits, axis=-1)
    weights = jnp.ones_like(loss) if weights is None else weights.astype(loss.dtype)
    return jnp.sum(loss * weights), jnp.sum(weights)


def _pick(logits: Float[Array, "*shape V"], labels: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The logit of each label; NaN for one outside 0..V-1, also for a negative one, which an index would wrap."""
    labels = labels.astype(jnp.int32)  # a narrower one cannot hold the number of classes
    inside = jnp.where(labels < 0, logits.shape[-1], labels)
    return jnp.take_along_axis(logits, inside[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
