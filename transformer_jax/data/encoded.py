"""What else a text becomes besides ids: padded arrays, and where in the text each id comes from."""

import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import tokenizers
from tokenizers import processors

from transformer_jax.errors import UserError

Padding = bool | Literal["max_length"]


class Encoded(TypedDict):
    """A batch of texts or pairs of texts, [batch, length]: int32 arrays where it is padded, else lists."""

    input_ids: Any
    attention_mask: Any
    """1 for a token, 0 for padding."""
    token_type_ids: Any
    """1 for the second text of a pair and the end token after it, else 0."""


class EncodedSpans(NamedTuple):
    """The ids of a text, and where each comes from."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """Its first character in the text and the one after its last, without the spaces around it."""
    words: list[int | None]
    """The number of its word, as the tokenizer divides a text into words."""


class EncodedWords(NamedTuple):
    """The ids of words, and the index of the word that each belongs to."""

    ids: list[int]
    words: list[int]


def encode_spans(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[str], special_ids: Collection[int], unknown_id: int | None
) -> list[EncodedSpans]:
    """The ids of each text with their spans; special ids among them are made unknown, or are left out."""
    rows = []
    for text, encoding in zip(texts, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
        ids = _plain(encoding.ids, special_ids, unknown_id, [True] * len(encoding))
        tokens = zip(ids, _spans(text, encoding.offsets), encoding.word_ids, strict=True)
        kept = [token for token in tokens if token[0] is not None]
        rows.append(EncodedSpans(*map(list, zip(*kept, strict=True))) if kept else EncodedSpans([], [], []))
    return rows


def joined(words: Sequence[str]) -> str:
    """The text of words; one of nothing but spaces is left out."""
    return " ".join(word for word in words if word.strip())


def group_by_word(words: Sequence[str], spans: EncodedSpans) -> EncodedWords:
    """The ids of `joined` words, each with the index of its word; a space belongs to the word after it."""
    text, numbers = joined(words), [number for number, word in enumerate(words) if word.strip()]
    next_starts = list(accumulate(len(words[number]) + 1 for number in numbers))
    # The first character decides, and where there are only spaces, the one after them.
    positions = [start if text[start:end].strip() else end for start, end in spans.offsets]
    return EncodedWords(spans.ids, [numbers[bisect_right(next_starts, position)] for position in positions])


def with_template(
    tokenizer: tokenizers.Tokenizer, begin_id: int, end_id: int, max_length: int | None
) -> tokenizers.Tokenizer:
    """A copy that cuts texts to `max_length` and, where it has no template, adds begin and end tokens."""
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    other.encode_special_tokens = True
    if other.post_processor is None:
        special = [
            {"id": name, "ids": [id], "tokens": [tokenizer.id_to_token(id)]}
            for name, id in (("begin", begin_id), ("end", end_id))
        ]
        other.post_processor = processors.TemplateProcessing(
            single="begin $A end", pair="begin $A end $B:1 end:1", special_tokens=special
        )
    if max_length is not None:
        other.enable_truncation(max_length, strategy="longest_first")
    return other


def encode_batch(
    tokenizer: tokenizers.Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    special_ids: Collection[int],
    unknown_id: int | None,
    *,
    add_special_tokens: bool,
) -> list[tuple[list[int], list[int]]]:
    """The ids and the type ids of each text, or pair of texts, in the tokenizer's template."""
    inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    rows = []
    for encoding in tokenizer.encode_batch(inputs, add_special_tokens=add_special_tokens):
        is_text = [not mark for mark in encoding.special_tokens_mask]
        ids = _plain(encoding.ids, special_ids, unknown_id, is_text)
        kept = [(id, type_id) for id, type_id in zip(ids, encoding.type_ids, strict=True) if id is not None]
        rows.append(([id for id, _ in kept], [type_id for _, type_id in kept]))
    return rows


def pad(rows: Sequence[tuple[list[int], list[int]]], pad_id: int, padding: Padding, max_length: int | None) -> Encoded:
    """A batch of rows of ids and type ids, padded on the right."""
    if not padding:
        return Encoded(
            input_ids=[ids for ids, _ in rows],
            attention_mask=[[1] * len(ids) for ids, _ in rows],
            token_type_ids=[types for _, types in rows],
        )
    if padding == "max_length" and max_length is None:
        raise UserError("padding='max_length' needs a max_length; give one, or padding=True for the longest text")
    width = max_length if padding == "max_length" else max((len(ids) for ids, _ in rows), default=0)
    shape = len(rows), width or 0
    batch = Encoded(
        input_ids=np.full(shape, pad_id, np.int32),
        attention_mask=np.zeros(shape, np.int32),
        token_type_ids=np.zeros(shape, np.int32),
    )
    for row, (ids, types) in enumerate(rows):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["token_type_ids"][row, : len(ids)] = types
    return batch


def _plain(
    ids: Sequence[int], special_ids: Collection[int], unknown_id: int | None, is_text: Sequence[bool]
) -> list[int | None]:
    """Ids in which a special one that was found in the text is made unknown, or None for a tokenizer without that."""
    return [unknown_id if text and id in special_ids else id for id, text in zip(ids, is_text, strict=True)]


def _spans(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans without the spaces at their ends, and with the accents after a letter that a normalizer joined to it.

    A span of nothing but spaces is left as it is.
    """
    spans, next_starts = [], [*(start for start, _ in offsets[1:]), len(text)]
    for (start, end), next_start in zip(offsets, next_starts, strict=False):  # which may be none
        while end < next_start and unicodedata.category(text[end]).startswith("M"):
            end += 1
        piece = text[start:end]
        if piece.strip():
            start, end = start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
        spans.append((start, end))
    return spans
