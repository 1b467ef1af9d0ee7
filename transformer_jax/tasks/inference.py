"""Batches for a trained model: texts that it is given, and rows of its data to be looked at, in a few shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.data.batches import Batch, Batches, Layout
from transformer_jax.data.rows import BatchingConfig, Rows
from transformer_jax.data.store import Store
from transformer_jax.parallel import Strategy
from transformer_jax.tasks.task import Watched


def bucket_width(max_length: int, batching: BatchingConfig) -> int:
    """The width of the narrowest rows; those of others are multiples of it, up to `max_length`."""
    return -(-max_length // batching.num_buckets)


def padded(
    ids: Sequence[int], width: int, *, max_length: int, pad_id: int, left: bool = False
) -> Int[np.ndarray, "1 T"]:
    """A row of one text, filled up to a multiple of `width`, on the left or on the right."""
    missing = min(-(-len(ids) // width) * width, max(len(ids), max_length)) - len(ids)
    return np.pad(np.array(ids, np.int32), (missing, 0) if left else (0, missing), constant_values=pad_id)[None]


def without_padding(
    title: str, weights: Float[Array, "L 1 N T S"], queries: list[str], keys: list[str], *, left: bool = False
) -> Watched:
    """The attention maps of a row that is padded, for its tokens alone."""
    rows, columns = (slice(-len(tokens), None) if left else slice(len(tokens)) for tokens in (queries, keys))
    # Of a NumPy array: one of JAX would compile a slice for each length.
    return Watched(title, jax.device_put(np.asarray(weights)[:, 0, :, rows, columns]), queries, keys)


def text_batches(
    texts: Sequence[Sequence[int]], batching: BatchingConfig, strategy: Strategy, *, max_length: int, pad_id: int
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Each text once, in a row of its own: the indices of the texts of a batch, and the batch, `{"ids": ...}`.

    Whatever the texts, there are no more shapes than `batching.num_buckets`, so a model is compiled no more often.
    """
    if not texts:
        return
    layout = Rows(
        Store.of([{"ids": text} for text in texts]),
        replace(batching, pack_length=None),
        pad_id=pad_id,
        width_multiple=bucket_width(max_length, batching),
        width_limit={"ids": max_length},
    )
    members = layout.members
    for rows, batch in Batches(layout, multiple=strategy.num_devices).once():
        yield members[rows], batch


def first_batches(layout: Layout, count: int, strategy: Strategy) -> Iterator[tuple[int, Batch]]:
    """The first rows of a layout, at most `count`, in the shapes of an evaluation: the number of a batch, and it."""
    left = min(count, sum(bucket.num_rows for bucket in layout.buckets))
    batches = Batches(layout, multiple=strategy.num_devices).once() if left else iter(())
    while left:
        rows, batch = next(batches)
        yield min(len(rows), left), batch
        left -= min(len(rows), left)
