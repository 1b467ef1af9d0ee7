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
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill")[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * jnp.mean(logits, axis=-1)
    weights = jnp.ones_like(loss) if weights is None else weights.astype(loss.dtype)
    return jnp.sum(loss * weights), jnp.sum(weights)
