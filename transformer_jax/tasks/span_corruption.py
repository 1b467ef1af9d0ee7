"""Span corruption: spans of a text are left out, and written down after it (Raffel et al. 2020, section 3.1.4)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from transformer_jax.errors import UserError


def lengths_for(input_length: int, *, density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """How many tokens to corrupt so that the input fills `input_length` ids, and the length of the target.

    It is the largest number whose input, with a sentinel for each span and the end token, is no longer than that; every
    `noise_mask` of so many tokens gives these lengths. 512 ids take 568 tokens, and have a target of 114. This is
    `random_spans_helper` of t5 but for its exception at a density of 0.5, where it wants targets no longer than inputs.
    """
    if input_length < 3:
        raise UserError(f"input_length={input_length} has no room for a token, a sentinel and the end; give at least 3")

    def lengths(length: int) -> tuple[int, int]:
        noise, spans = _counts(length, density, mean_span)
        return length - noise + spans + 1, noise + spans + 1

    length = input_length - 1
    while lengths(length + 1)[0] <= input_length:
        length += 1
    return length, lengths(length)[1]


def noise_mask(
    length: int, random: np.random.Generator, *, density: float = 0.15, mean_span: float = 3.0
) -> Bool[np.ndarray, "T"]:
    """Which tokens to leave out: `density` of them, in spans of `mean_span` on average.

    The numbers of tokens and of spans are fixed, and all masks that have them, begin with a token that stays and end
    with one that does not are equally likely (`random_spans_noise_mask` of t5). A single token stays.
    """
    if length < 2:
        return np.zeros(length, bool)
    noise, spans = _counts(length, density, mean_span)
    runs = np.stack([_segments(length - noise, spans, random), _segments(noise, spans, random)], axis=1)
    return np.repeat(np.tile([False, True], spans), runs.ravel())


def corrupt_spans(
    ids: Int[np.ndarray, "T"], mask: Bool[np.ndarray, "T"], *, sentinels: Sequence[int], end_id: int
) -> tuple[Int[np.ndarray, "I"], Int[np.ndarray, "O"]]:
    """The text with a sentinel for each span that is left out, and the spans, each after its sentinel.

    `sentinels` are taken in order; those of T5 count down, from <extra_id_0>, the highest id. A text that goes on after
    its last span has one more sentinel at the end of the targets, where it says that nothing else is missing: "Thank
    you <X> me to your party <Y> week" becomes "<X> for inviting <Y> last <Z>". After a span that ends the text, as the
    last of `noise_mask` does, there is none: the end token says it. So it is in t5 too, whose sentinels do not agree
    between inputs and targets where a text begins with a span; here they do.
    """
    if ids.shape != mask.shape:
        raise ValueError(f"mask has shape {mask.shape} but ids has shape {ids.shape}")
    begins = mask.copy()
    begins[1:] &= ~mask[:-1]
    spans = int(np.count_nonzero(begins))
    needed = spans + int(np.count_nonzero(~mask[-1:]))
    if needed > len(sentinels):
        raise UserError(
            f"sentinels has {len(sentinels)} ids but this text of {len(ids)} tokens takes {needed}; "
            "give more sentinels, shorter texts or longer spans"
        )
    marks = np.asarray(sentinels[:needed], ids.dtype)
    end = np.array([end_id], ids.dtype)
    marked = ids.copy()
    marked[begins] = marks[:spans]
    inputs = np.concatenate([marked[begins | ~mask], end])
    missing = np.insert(ids[mask], np.flatnonzero(begins[mask]), marks[:spans])
    return inputs, np.concatenate([missing, marks[spans:], end])


def _counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """How many of two or more tokens are left out, and in how many spans."""
    if not 0 < density < 1 or not mean_span >= 1:
        raise UserError(f"density={density} must be between 0 and 1, and mean_span={mean_span} at least 1")
    # t5 rounds in single precision for the mask and in double precision for the lengths; here the two always agree.
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / mean_span), 1)
    return noise, min(spans, length - noise)  # t5 fails where too few tokens are left to stand between the spans


def _segments(total: int, count: int, random: np.random.Generator) -> np.ndarray:
    """The lengths of `count` segments, none of them empty, that `total` things are cut into at random."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False, shuffle=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
