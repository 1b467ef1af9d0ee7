"""Next-sentence prediction: whether one text follows another (Devlin et al. 2019, section 3.1)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_jax.errors import UserError


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
    sentences: Sequence[np.ndarray],
    random: np.random.Generator,
    *,
    max_length: int,
    other: Callable[[np.random.Generator], Sequence[np.ndarray]],
) -> Pair:
    """Cut consecutive sentences in two; with even chance, take the second part from another document.

    As in `create_pretraining_data.py` of BERT. The cut is at a random boundary of sentences, of which there should be
    enough for `max_length` tokens; a single sentence is never followed by its own document. `other(random)` gives the
    sentences from a random place of another document on: as many are taken as fill the room beside the first part, at
    least one. Then the pair is cut to `max_length` tokens, without the special ones that `assemble` adds.

    BERT makes one row in ten shorter, so that short texts are known too: give a smaller `max_length` for these.
    """
    if max_length < 2:
        raise UserError(f"max_length={max_length} leaves no room for two texts; give at least 2")
    if not sentences:
        raise ValueError("sentences is empty; give at least one")
    single = len(sentences) == 1
    cut = 1 if single else int(random.integers(1, len(sentences)))
    is_next = not single and bool(random.random() < 0.5)
    first = np.concatenate(sentences[:cut])
    rest = sentences[cut:] if is_next else _filling(other(random), max_length - len(first))
    return Pair(*_truncated(first, np.concatenate(rest), max_length, random), is_next)


def assemble(pair: Pair, *, begin_id: int, end_id: int) -> tuple[Int[np.ndarray, "A+B+3"], Int[np.ndarray, "A+B+3"]]:
    """The ids [CLS] first [SEP] second [SEP], and the type of each: 0 up to the first [SEP], 1 after it."""
    begin, end = (np.array([id], pair.first.dtype) for id in (begin_id, end_id))
    ids = np.concatenate([begin, pair.first, end, pair.second, end])
    types = (np.arange(len(ids)) >= len(pair.first) + 2).astype(np.int32)
    return ids, types


def _filling(sentences: Sequence[np.ndarray], room: int) -> list[np.ndarray]:
    """The first of these sentences, up to the one that fills the room."""
    if not sentences:
        raise ValueError("other gave no sentences; it must give those of a document that has some")
    taken = []
    for sentence in sentences:
        taken.append(sentence)
        room -= len(sentence)
        if room <= 0:
            break
    return taken


def _truncated(
    first: np.ndarray, second: np.ndarray, max_length: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Drop tokens until the two fit, each from the longer text, or from the second, and from a random end of it.

    Which text loses how many does not depend on chance, and of those it loses each is at the front with chance 1/2: so
    the number lost at the front is binomial.
    """
    if len(first) + len(second) <= max_length:
        return first, second
    length = min(len(first), max(max_length - len(second), (max_length + 1) // 2))
    return _window(first, length, random), _window(second, max_length - length, random)


def _window(text: np.ndarray, length: int, random: np.random.Generator) -> np.ndarray:
    begin = random.binomial(len(text) - length, 0.5)
    return text[begin : begin + length]
