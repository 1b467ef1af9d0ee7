"""Rows of sentences for masked language modelling: every token of every document is in one."""

from dataclasses import dataclass

import numpy as np

from transformer_jax.data.batches import Batch, Bucket, RowRng
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
    """Most tokens of a row that are predicted."""
    rate: float
    """Fraction of the tokens of a row that are predicted."""
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

    A document is cut into texts, one for each row: whole sentences, or a piece of one that is longer than a row. So an
    epoch has every token. Where texts are cut stays the same; what is masked in a row and what else is in it is random
    each time.

    Args:
        store: the sentences.
        config: what rows are like.
        continues: for each id whether it goes on with a word, where words are to be masked whole.
    """

    members = None

    def __init__(self, store: Store, config: SentenceRowsConfig, *, continues: np.ndarray | None = None):
        self._store, self._config, self._continues = store, config, continues
        self._room = config.length - (3 if config.pairs else 2)
        self._documents = _documents(store)
        self._texts = _texts(self._ends, self._documents, self._room, pairs=config.pairs)
        self.buckets = [Bucket(len(self._texts), config.batch_rows)]

    def describe(self) -> str:
        """What there is, for people."""
        return f"{len(self._ids):,} tokens of {len(self._documents):,} documents"

    def rows(self, bucket: int, indices: np.ndarray, count: int, rng: RowRng) -> Batch:
        """Arrays of `count` rows: those of these indices, then empty ones."""
        config = self._config
        batch = {
            "ids": np.full((count, config.length), config.pad_id, np.int32),
            "types": np.zeros((count, config.length), np.int32),
            "valid": np.zeros((count, config.length), bool),
            "positions": np.zeros((count, config.max_predictions), np.int32),
            "labels": np.zeros((count, config.max_predictions), np.int32),
            "weights": np.zeros((count, config.max_predictions), np.float32),
            "pair": np.zeros(count, np.int32),
        }
        for row, index in enumerate(indices):
            random = rng(row)
            ids, types, label = self._row(int(index), random)
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
            found = len(masked.positions)
            batch["ids"][row, : len(ids)], batch["types"][row, : len(ids)] = masked.ids, types
            batch["valid"][row, : len(ids)] = True  # a token may well be replaced by the padding id
            batch["positions"][row, :found], batch["labels"][row, :found] = masked.positions, masked.labels
            batch["weights"][row, :found], batch["pair"][row] = 1, label
        return batch

    @property
    def _ids(self) -> np.ndarray:
        return self._store.values["text"]

    @property
    def _ends(self) -> np.ndarray:
        """Where each sentence ends in the ids."""
        return self._store.ends["text"]

    def _row(self, number: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """The ids of a row, their types, and whether its texts follow each other."""
        config = self._config
        document, start, end = self._texts[number]
        text = self._span(start, end)
        if not config.pairs:
            ids = np.concatenate([[config.begin_id], text, [config.end_id]]).astype(np.int32)
            return ids, np.zeros_like(ids), 0
        length = self._room if random.random() >= SHORT else int(random.integers(len(text) + 1, self._room + 1))
        first, last = self._documents[document]
        pair = sentence_pair(
            text,
            self._span(self._sentence_start(max(start - (length - len(text)), first), start), start),
            self._span(end, min(end + length, last)),
            random,
            max_length=length,
            other=lambda random: self._other(number, random),
        )
        return *assemble(pair, begin_id=config.begin_id, end_id=config.end_id), pair.label

    def _other(self, number: int, random: np.random.Generator) -> np.ndarray:
        """What begins with a random text of another document; of the same one, but not next, where it is the only one.

        Texts that follow begin where texts begin, too: the beginning of the second does not show the label.
        """
        first, last = np.searchsorted(self._texts[:, 0], self._texts[number, 0] + np.arange(2))  # of this document
        if last - first < len(self._texts):
            text = int(random.integers(len(self._texts) - (last - first)))
            text += (last - first) * (text >= first)
        else:
            text = int(random.integers(max(len(self._texts) - 1, 1)))
            text += text > number
        document, start, _ = self._texts[text]
        return self._span(start, min(start + self._room, self._documents[document, 1]))

    def _sentence_start(self, start: int, end: int) -> int:
        """Where the first sentence of a part of a document begins; at once, if none does."""
        if start == 0 or start >= end:
            return start
        found = int(self._ends[np.searchsorted(self._ends, start)])
        return found if found < end else start

    def _span(self, start: int, end: int) -> np.ndarray:
        return np.asarray(self._ids[start:end], np.int32)


def _documents(store: Store) -> np.ndarray:
    """Where each document begins and ends in the ids of all sentences, [documents, 2]."""
    if not len(store):
        return np.zeros((0, 2), np.int64)
    filled = store.lengths[:, 0] > 0
    runs = np.flatnonzero(np.diff(filled, prepend=False, append=False)).reshape(-1, 2)
    ends = store.ends["text"]
    return np.stack([np.where(runs[:, 0] > 0, ends[runs[:, 0] - 1], 0), ends[runs[:, 1] - 1]], axis=1)


def _texts(ends: np.ndarray, documents: np.ndarray, room: int, *, pairs: bool) -> np.ndarray:
    """The texts that documents are cut into: (document, beginning, end) in the ids of all sentences, [texts, 3].

    A text is as many sentences as there is room for, or one in ten a random number of these. That of a pair is always a
    random number, as BERT cuts a row in two at random, and leaves room for a token of the other. Of a sentence that is
    longer than the room, tokens take the place of sentences.
    """
    random = np.random.default_rng(0)  # the same cuts whenever a run goes on
    texts = []
    for document, (first, last) in enumerate(documents.tolist()):
        start = first
        while start < last:
            limit = min(start + room - pairs, last)
            inside = ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, limit, "right")]
            if pairs and (inside < last).any():
                inside = inside[inside < last]  # so that there is something to follow
            choices = inside if len(inside) else range(start + 1, limit + 1)
            end = int(choices[random.integers(len(choices)) if pairs or random.random() < SHORT else -1])
            texts.append((document, start, end))
            start = end
    return np.array(texts, np.int64).reshape(-1, 3)
