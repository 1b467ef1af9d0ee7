"""Masked language modelling: some tokens are hidden and predicted from all others (Devlin et al. 2019, section 3.1)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from transformer_jax.errors import UserError


class Masked(NamedTuple):
    """A row with some of its tokens replaced, and what was there."""

    ids: Int[np.ndarray, "T"]
    positions: Int[np.ndarray, "P"]
    """Where a token is to be predicted, in ascending order."""
    labels: Int[np.ndarray, "P"]
    """The tokens that were there."""


def mask_tokens(
    ids: Int[np.ndarray, "T"],
    candidates: Bool[np.ndarray, "T"],
    random: np.random.Generator,
    *,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    max_predictions: int,
    continues: Bool[np.ndarray, "T"] | None = None,
) -> Masked:
    """Choose tokens to predict; of these 80 % become the mask, 10 % stay and 10 % become any token of the vocabulary.

    As in `create_pretraining_data.py` of BERT, the number chosen is `rate` times the length of the row, special tokens
    counted and padding not: give `ids` without it. At least one token is chosen, at most `max_predictions`, and only
    where `candidates` is True; so there are fewer, or none, where the candidates are fewer.

    `continues` is True where a token goes on with the word of the one before, as "##ing" does. With it words are chosen
    whole, a word that is longer than what is left of the number is passed over, and so the number may not be reached.
    Each token of a word still becomes mask, itself or another on its own. A special token ends a word.
    """
    for name, mask in (("candidates", candidates), ("continues", candidates if continues is None else continues)):
        if mask.shape != ids.shape:
            raise ValueError(f"{name} has shape {mask.shape} but ids has shape {ids.shape}")
    if not 0 < rate <= 1 or max_predictions < 1:
        raise UserError(f"rate={rate} must be over 0 and at most 1, and max_predictions={max_predictions} at least 1")
    number = min(max_predictions, max(1, round(len(ids) * rate)))
    positions = _choose(candidates, continues, number, random)
    labels = ids[positions]

    uniform = random.random(len(positions))
    others = random.integers(vocab_size, size=len(positions))
    replaced = ids.copy()
    replaced[positions] = np.where(uniform < 0.8, mask_id, np.where(uniform < 0.9, labels, others))
    return Masked(replaced, positions, labels)


def _choose(
    candidates: np.ndarray, continues: np.ndarray | None, number: int, random: np.random.Generator
) -> np.ndarray:
    """The positions of at most `number` tokens: words in random order, each taken if there is room for all of it."""
    begins = candidates.copy()
    if continues is not None:
        begins[1:] &= ~(continues[1:] & candidates[:-1])
    positions = np.flatnonzero(candidates)
    words = np.flatnonzero(begins[positions])
    lengths = np.diff(words, append=len(positions))

    chosen = np.zeros(len(words), bool)
    room = number
    for word in random.permutation(len(words)).tolist():
        if lengths[word] <= room:
            chosen[word] = True
            room -= lengths[word]
        if not room:
            break
    return positions[np.repeat(chosen, lengths)]
