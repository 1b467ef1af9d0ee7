"""Rows of sentences for masked language modelling: as many of a document as fill one, which chance cuts and masks."""

from dataclasses import dataclass

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, Chance
from transformer_jax.data.store import Store
from transformer_jax.tasks.sentence_pairs import assemble, sentence_pair
from transformer_jax.tasks.token_masking import mask_tokens

SHORT = 0.1  # of the rows are shorter, so that short texts are known too


@dataclass(frozen=True)
class SentenceRowsConfig:
    """What rows are like."""

    length: int
    """Tokens of a row, special ones included."""
    batch_rows: int
    max_predictions: int
    """Most tokens of a row that are predicted,"""
    rate: float
    """and their share of it."""
    pairs: bool
    """Whether a row is two texts, of which the second may follow the first, or one."""
    pad_id: int
    begin_id: int
    end_id: int
    mask_id: int
    vocab_size: int
    """Ids that a token may be replaced by."""


class SentenceRows:
    """A layout of sentences `{"text": ids}`, with an empty one after each document.

    Args:
        store: the sentences.
        config: what rows are like.
        continues: for each id whether it goes on with a word, where words are to be masked whole.
    """

    def __init__(self, store: Store, config: SentenceRowsConfig, *, continues: np.ndarray | None = None):
        self._store, self._config, self._continues = store, config, continues
        self._room = config.length - (3 if config.pairs else 2)
        (lengths,) = store.lengths.T if len(store) else (np.zeros(0, int),)
        self._documents = _runs(lengths > 0)
        self._chunks = _chunks(lengths, self._documents, self._room)
        self.buckets = [Bucket(len(self._chunks), config.batch_rows)]
        self._num_tokens = int(lengths.sum())

    def describe(self) -> str:
        """What there is, for people."""
        return f"{self._num_tokens:,} tokens of {len(self._documents):,} documents"

    def rows(self, bucket: int, numbers: np.ndarray, count: int, chance: Chance) -> Batch:
        """Arrays of `count` rows: those of these numbers, then empty ones."""
        config = self._config
        batch = {
            "ids": np.full((count, config.length), config.pad_id, np.int32),
            "types": np.zeros((count, config.length), np.int32),
            "valid": np.zeros((count, config.length), bool),
            "places": np.zeros((count, config.max_predictions), np.int32),
            "labels": np.zeros((count, config.max_predictions), np.int32),
            "weights": np.zeros((count, config.max_predictions), np.float32),
            "pair": np.zeros(count, np.int32),
        }
        for place, number in enumerate(numbers):
            random = chance(place)
            ids, types, label = self._texts(int(number), random)
            special = np.isin(ids, (config.begin_id, config.end_id))
            masked = mask_tokens(
                ids,
                ~special,
                random,
                mask_id=config.mask_id,
                vocab_size=config.vocab_size,
                rate=config.rate,
                max_predictions=config.max_predictions,
                continues=None if self._continues is None else self._continues[ids],
            )
            found = len(masked.places)
            batch["ids"][place, : len(ids)], batch["types"][place, : len(ids)] = masked.ids, types
            batch["valid"][place, : len(ids)] = True  # a token may well be replaced by the padding id
            batch["places"][place, :found], batch["labels"][place, :found] = masked.places, masked.labels
            batch["weights"][place, :found], batch["pair"][place] = 1, label
        return batch

    def _texts(self, number: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """The ids of a row, their types, and whether its texts follow each other."""
        document, first, end = self._chunks[number]
        config = self._config
        room = self._room if random.random() >= SHORT else int(random.integers(2, self._room + 1))
        sentences = [self._sentence(i) for i in range(first, end)]
        if config.pairs:
            pair = sentence_pair(sentences, random, max_length=room, other=lambda random: self._other(document, random))
            return *assemble(pair, begin_id=config.begin_id, end_id=config.end_id), pair.label
        text = np.concatenate(sentences)[:room]
        ids = np.concatenate([[config.begin_id], text, [config.end_id]]).astype(np.int32)
        return ids, np.zeros_like(ids), 0

    def _other(self, document: int, random: np.random.Generator) -> list[np.ndarray]:
        """The sentences from a random place of another document on; of the same one where it is the only one."""
        other = int(random.integers(max(len(self._documents) - 1, 1)))
        other += other >= document and len(self._documents) > 1
        first, end = self._documents[other]
        start = int(random.integers(first, end))
        return [self._sentence(i) for i in range(start, min(end, start + self._room))]

    def _sentence(self, number: int) -> np.ndarray:
        return np.asarray(self._store[number]["text"], np.int32)


def _runs(filled: np.ndarray) -> np.ndarray:
    """The first of each run of True and the one after its last, [runs, 2]."""
    return np.flatnonzero(np.diff(filled, prepend=False, append=False)).reshape(-1, 2)


def _chunks(lengths: np.ndarray, documents: np.ndarray, room: int) -> list[tuple[int, int, int]]:
    """Consecutive sentences that fill the room: (document, first sentence, the one after the last)."""
    chunks = []
    for document, (begin, end) in enumerate(documents.tolist()):
        first, total = begin, 0
        for sentence in range(begin, end):
            total += int(lengths[sentence])
            if total >= room or sentence == end - 1:
                chunks.append((document, first, sentence + 1))
                first, total = sentence + 1, 0
    return chunks
