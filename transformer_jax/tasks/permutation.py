"""Permutation language modelling: tokens predicted in a random order, each from those before it (Yang et al. 2019)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from transformer_jax.errors import UserError


class Permuted(NamedTuple):
    """A factorization order of a row, and what may attend to what in it: True is "may", as everywhere."""

    order: Int[np.ndarray, "T"]
    """When a token is known: -1 from the beginning, then one after the other."""
    positions: Int[np.ndarray, "P"]
    """The targets, in ascending order: the rows of the original's `target_mapping`."""
    content: Bool[np.ndarray, "T T"]
    """A token sees itself and all that are known before it."""
    query: Bool[np.ndarray, "T T"]
    """The same without itself: what is known where a token is to be predicted."""


def sample_targets(
    functional: Bool[np.ndarray, "T"],
    random: np.random.Generator,
    *,
    num_predict: int,
    alpha: int = 6,
    max_gram: int = 5,
) -> Bool[np.ndarray, "T"]:
    """Choose exactly `num_predict` tokens: short spans with context around them (section 3.1, `_sample_mask` of xlnet).

    From left to right, a span of n = 1 to `max_gram` tokens, with a probability in proportion to 1/n, comes at a random
    position among n * `alpha` others, until there are enough; the last span is shortened. What the row has no room for
    is made up of single tokens from anywhere. A span begins at any token, whereas those of the original begin with a
    word.

    `functional` tokens ([SEP], [CLS]) are never chosen. The original predicts less where its spans cover them; here
    they are replaced by single tokens, so that each row has the same number.
    """
    if num_predict > np.count_nonzero(~functional):
        raise UserError(
            f"num_predict={num_predict} is more than the {np.count_nonzero(~functional)} tokens of the row that can be "
            "predicted; lower it or use longer rows"
        )
    if alpha < 1 or max_gram < 1:
        raise UserError(f"alpha={alpha} and max_gram={max_gram} must be at least 1")
    length = len(functional)
    enough = min(num_predict, -(-length // (alpha + 1)))
    weights = 1 / np.arange(1, max_gram + 1)
    grams = random.choice(max_gram, enough, p=weights / weights.sum()) + 1
    grams = np.diff(np.minimum(np.cumsum(grams), num_predict), prepend=0)
    left = (random.random(enough) * grams * alpha).astype(int)
    stride = grams * (alpha + 1)
    starts = np.cumsum(stride) - stride + left
    fits = (starts + grams < length) & (grams > 0)

    edges = np.zeros(length, int)
    edges[starts[fits]] = 1
    edges[(starts + grams)[fits]] = -1  # no span touches the next: at least one token of its context follows it
    targets = np.cumsum(edges).astype(bool) & ~functional
    missing = num_predict - np.count_nonzero(targets)
    targets[random.choice(np.flatnonzero(~targets & ~functional), missing, replace=False)] = True
    return targets


def permutation_masks(
    is_target: Bool[np.ndarray, "T"],
    functional: Bool[np.ndarray, "T"],
    random: np.random.Generator,
    *,
    size: int | None = None,
) -> Permuted:
    """Sample a factorization order, and the masks of the two streams for it (section 2.3, `_local_perm` of xlnet).

    Tokens that are neither targets nor functional are known from the beginning: all see them, and they see only each
    other. Targets and functional tokens come one after the other in random order and see what came before. With `size`,
    the row is cut into blocks of this many tokens, which come from left to right, all in the same random order inside.

    The original's `perm_mask` is the opposite of `query` but for tokens that are no targets, which see themselves in
    it; nothing is predicted there. Its model then lets every token see itself in the content stream.
    """
    length = len(is_target)
    size = length if size is None else size
    if is_target.shape != functional.shape:
        raise ValueError(f"is_target has shape {is_target.shape} but functional has shape {functional.shape}")
    if (is_target & functional).any():
        raise ValueError(f"the functional tokens at {np.flatnonzero(is_target & functional)} cannot be targets")
    if size < 1 or length % size:
        raise UserError(f"size={size} does not divide the row of {length} tokens; give a divisor of {length}")
    blocks = np.arange(0, length, size)
    permuted = (blocks[:, None] + random.permutation(size)[None, :]).ravel()
    order = np.where(is_target | functional, permuted, -1).astype(np.int32)
    content = order[:, None] >= order[None, :]
    query = content.copy()
    np.fill_diagonal(query, False)
    return Permuted(order, np.flatnonzero(is_target), content, query)
