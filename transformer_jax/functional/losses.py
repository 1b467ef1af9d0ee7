"""Losses, each as a sum and a weight: divided once, when all devices and micro-batches are added up."""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, PyTree

LOGITS_AT_ONCE = 2**26
"""Most logits that a device holds at once in a loss over a vocabulary: a quarter of a gigabyte in float32."""

Sums = TypeVar("Sums", bound=PyTree[Array])


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


def chunked_cross_entropy(
    x: Float[Array, "B T D"],
    logits: Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    label_smoothing: float = 0.0,
    num_chunks: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy(logits(x), labels, weights)` without the logits of all positions in memory; see `chunked_sums`."""
    weights = jnp.ones(labels.shape) if weights is None else weights

    def total(logits: Array, labels: Array, weights: Array) -> Array:
        return cross_entropy(logits, labels, weights, label_smoothing=label_smoothing)[0]

    sum_of_losses = chunked_sums(total, x, logits, labels, weights, num_chunks=num_chunks)
    return sum_of_losses, jnp.sum(weights.astype(sum_of_losses.dtype))


def chunked_sums(
    function: Callable[..., Sums],
    x: Float[Array, "B T D"],
    logits: Callable[[Float[Array, "B t D"]], Float[Array, "B t V"]],
    *arrays: Array,
    num_chunks: int | None = None,
) -> Sums:
    """`function(logits(x), *arrays)`, sums over positions, in chunks of the positions one after the other.

    The backward pass computes the logits of each chunk again, so that those of all positions are never in memory. One
    chunk is the function itself, where nothing is computed again.

    Args:
        function: from the logits [B, t, V] and the arrays [B, t] of some positions to sums over these. A position where
            the arrays are zero must not count: such ones are added where the chunks do not divide T.
        x: the hidden states.
        logits: the output layer, a function of each position by itself: `model.logits`.
        arrays: labels, weights and what else there is for each position.
        num_chunks: number of chunks; by default the least power of two with which no device holds more than
            `LOGITS_AT_ONCE` logits.
    """
    length = x.shape[1]
    if num_chunks is None:
        num_chunks = _num_chunks(jax.eval_shape(logits, x).size)
    num_chunks = min(num_chunks, length)
    if num_chunks <= 1:
        return function(logits(x), *arrays)

    def divide(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, -length % num_chunks)] + [(0, 0)] * (array.ndim - 2))
        # Chunk i has the positions i, i + c, i + 2c, ...: where the length is sharded, every device has some of each.
        return jnp.moveaxis(padded.reshape(array.shape[0], -1, num_chunks, *array.shape[2:]), 2, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def sums_of(x: Array, *arrays: Array) -> Sums:
        return function(logits(x), *arrays)

    chunks = tuple(map(divide, (x, *arrays)))
    shapes = jax.eval_shape(sums_of, *(chunk[0] for chunk in chunks))
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return jax.lax.scan(lambda sums, chunk: (jax.tree.map(jnp.add, sums, sums_of(*chunk)), None), zeros, chunks)[0]


def _num_chunks(num_logits: int) -> int:
    """The least power of two by which this many logits are divided into what every device can hold."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    num_devices = math.prod(size for size, kind in axes if kind == AxisType.Auto)
    return 1 << (max(num_logits - 1, 0) // (num_devices * LOGITS_AT_ONCE)).bit_length()


def _pick(logits: Float[Array, "*shape V"], labels: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The logit of each label; NaN for one outside 0..V-1, also for a negative one, which an index would wrap."""
    labels = labels.astype(jnp.int32)  # a narrower one cannot hold the number of classes
    inside = jnp.where(labels < 0, logits.shape[-1], labels)
    return jnp.take_along_axis(logits, inside[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
