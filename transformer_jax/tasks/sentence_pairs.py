"""Next-sentence prediction: whether one text follows another (Devlin et al. 2019, section 3.1)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Pair(NamedTuple):
    """Two texts, and whether the second follows the first in a document."""

    first: Int[np.ndarray, "A"]
    second: Int[np.ndarray, "B"]
    is_next: bool

    @property
    def label(self) -> int:
        """The class of the pair, as in the published checkpoints: 0 is "IsNext" and 1 is "NotNext"."""
        return 0 if self.is_next else 1


def sentence_pair(
    text: Int[np.ndarray, "A"],
    before: Int[np.ndarray, "B"],
    after: Int[np.ndarray, "C"],
    random: np.random.Generator,
    *,
    max_length: int,
    other: Callable[[np.random.Generator], Int[np.ndarray, "D"]],
) -> Pair:
    """A text of a document, and with probability 1/2 the text that follows it there or one of another document.

    The second text is cut to the room that there is beside the first, `max_length` tokens for both without the special
    ones that `assemble` adds. A text that ends its document follows what is `before` it instead of being followed by
    what is `after`; one that is all of its document is always beside another. `other(random)` gives a text of another
    document. BERT samples the first text anew for each row, and puts what it does not use back for the next one; here
    every row has a text of its own, all of it, so that none is lost.

    BERT makes one row in ten shorter, so that short texts are known too: give a smaller `max_length` for these.
    """
    room = max_length - len(text)
    if not len(text) or room < 1:
        raise ValueError(f"text has {len(text)} tokens; give at least 1, and fewer than max_length={max_length}")
    has_neighbour = len(before) > 0 or len(after) > 0
    if not has_neighbour or random.random() < 0.5:
        return Pair(text, other(random)[:room], is_next=False)
    return Pair(text, after[:room], is_next=True) if len(after) else Pair(before[-room:], text, is_next=True)


def assemble(pair: Pair, *, begin_id: int, end_id: int) -> tuple[Int[np.ndarray, "A+B+3"], Int[np.ndarray, "A+B+3"]]:
    """The ids [CLS] first [SEP] second [SEP], and the type of each: 0 up to the first [SEP], 1 after it."""
    begin, end = (np.array([id], pair.first.dtype) for id in (begin_id, end_id))
    ids = np.concatenate([begin, pair.first, end, pair.second, end])
    types = (np.arange(len(ids)) >= len(pair.first) + 2).astype(np.int32)
    return ids, types
