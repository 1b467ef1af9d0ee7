"""Which examples share a row, so that little of it is padding."""

import numpy as np


def pack(lengths: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The row of each example, [examples].

    Rows are filled one after the other, each time with the example whose lengths have the largest inner product with
    the room that is left (Panigrahy et al. 2011, "Heuristics for vector bin packing"). Only lengths matter, so a way to
    fill a row is used for as many rows as there are examples for: the work grows with the number of different lengths.

    Args:
        lengths: [examples, sides]; an example takes that much on every side of a row (source and target, say).
        capacity: [sides], the room on each side of a row. Nothing may be longer.
    """
    if not len(lengths):
        return np.zeros(0, int)
    sizes, size_of, counts = np.unique(lengths, axis=0, return_inverse=True, return_counts=True)
    if (sizes > capacity).any():
        raise ValueError(
            f"an example has lengths {sizes[(sizes > capacity).any(1)][0]}, but a row has room for {capacity}"
        )
    examples = np.split(np.argsort(size_of, kind="stable"), np.cumsum(counts)[:-1])
    row_of, num_rows = np.empty(len(lengths), int), 0
    while counts.any():
        filling = _fill(sizes, counts, capacity)
        used = np.flatnonzero(filling)
        times = int((counts[used] // filling[used]).min())
        for size in used:
            taken = examples[size][counts[size] - times * filling[size] : counts[size]]
            row_of[taken] = num_rows + np.arange(len(taken)) % times
        counts -= times * filling
        num_rows += times
    return row_of


def _fill(sizes: np.ndarray, counts: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """How many examples of each size fill one row."""
    filling, room = np.zeros_like(counts), capacity.copy()
    while len(fitting := np.flatnonzero((sizes <= room).all(axis=1) & (filling < counts))):
        best = fitting[np.argmax(sizes[fitting] @ (room / capacity**2))]
        filling[best] += 1
        room = room - sizes[best]
    return filling
