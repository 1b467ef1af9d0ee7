"""How each kind of tokenizer is learned from text, with the `tokenizers` library.

No kind rewrites a text. It is cut into words that keep the space before them, and the words into tokens, which joined
together are the text again. The same texts give the same tokenizer, byte by byte, however many threads there are.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from transformer_jax.errors import UserError

Kind = Literal["bpe", "byte_bpe", "unigram", "wordpiece", "characters", "bytes"]

WORDS = r"\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s"
"""What no token reaches across: a digit, a word or a run of signs with the space before it, any other space."""

SHORT_WORDS = WORDS.replace("+", "{1,32}")
"""The same, cut every 32 characters: for models that a long word makes slow, or not a number, or unknown as a whole."""

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def learn(
    texts: Iterable[str], kind: Kind, vocab_size: int, special: Sequence[str], tags: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """A tokenizer of at most `vocab_size` tokens, with room left in it for the tags.

    Args:
        texts: Read once, one after the other; a tag that begins a text is not learned from.
        kind: How text becomes tokens.
        vocab_size: The limit that includes special tokens and tags.
        special: The special tokens, which get the first ids; for a kind that needs an unknown token, it is the last.
        tags: Words that are to be added as tokens of their own.
    """
    for name in special:
        if len(_split(WORDS).pre_tokenize_str(name)) < 2:
            raise UserError(f"the special token {name!r} could be a word of a text; name it like <pad> or [PAD]")
    num_fixed = len(special) + len(tags) + (0 if kind in ("bpe", "wordpiece", "characters") else 256)
    if kind in ("byte_bpe", "bytes"):
        _check_size(kind, vocab_size, num_fixed)
    size = max(vocab_size - len(tags), 0)
    texts = _read((_without(text, tags) for text in texts), kind, vocab_size, num_fixed)
    match kind:
        case "bpe":
            return _bpe(texts, size, special)
        case "byte_bpe":
            return _byte_bpe(texts, size, special)
        case "unigram":
            return _unigram(texts, size, special)
        case "wordpiece":
            return _wordpiece(texts, size, special)
        case "characters":
            return _bpe(texts, 0, special)
        case "bytes":
            return _byte_bpe((), 0, special)


def _bpe(texts: Iterable[str], size: int, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-pair encoding of characters (Sennrich et al. 2016); with a size of 0, the characters alone."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=special[-1]))
    tokenizer.pre_tokenizer = _split(WORDS)
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_bpe(texts: Iterable[str], size: int, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-pair encoding of UTF-8 (Radford et al. 2019), which has no unknowns; with a size of 0, the bytes alone."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_split(WORDS), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=to_bytes.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _unigram(texts: Iterable[str], size: int, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Unigram language model (Kudo 2018) and 256 tokens that spell what it never saw in bytes, as in SentencePiece."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = _split(SHORT_WORDS)
    num_pieces = size - len(special) - len(BYTE_TOKENS)
    trainer = trainers.UnigramTrainer(
        vocab_size=max(num_pieces + len(special), 16),  # for a handful of pieces its loop may not end
        special_tokens=list(special),
        unk_token=special[-1],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"][len(special) :]
    fixed = [(token, 0.0) for token in (*special, *BYTE_TOKENS)]
    pieces = [*fixed, *_settled(pieces, num_pieces)]
    tokenizer.model = models.Unigram(pieces, unk_id=len(special) - 1, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _settled(pieces: Sequence[tuple[str, float]], num_pieces: int) -> list[tuple[str, float]]:
    """The characters and the best of the longer pieces, without traces of the random order that the trainer sums in."""

    def rank(pair: tuple[str, float]) -> tuple[float, str]:
        return -pair[1], pair[0]

    characters = [(piece, score) for piece, score in pieces if len(piece) == 1]
    # A character of no use as a piece has the lowest score, and 0.0001 more for each such one that came before it.
    lowest = min(score for _, score in pieces)
    useless = lowest + 0.0001 * len(characters)
    characters = [(piece, round(lowest if score < useless else score, 3)) for piece, score in characters]
    longer = [(piece, round(score, 3)) for piece, score in pieces if len(piece) > 1]
    return sorted([*characters, *sorted(longer, key=rank)[: num_pieces - len(characters)]], key=rank)


def _wordpiece(texts: Iterable[str], size: int, special: Sequence[str]) -> tokenizers.Tokenizer:
    """Wordpieces, the longest first; a word with a character never seen is unknown as a whole.

    It is the beginning of a word that is marked, by its own space, as in Wu et al. 2016. BERT marks the continuations
    with ## instead, and so forgets where the spaces were. As in BERT, a Chinese character is a word.
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=special[-1], continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_split(r"\p{Han}"), _split(SHORT_WORDS)])
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(special), continuing_subword_prefix="", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _read(texts: Iterable[str], kind: Kind, vocab_size: int, num_fixed: int) -> Iterator[str]:
    """The texts, and behind the last an error where they are empty or have too many characters."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
        yield text
    if not characters:
        raise UserError(f"there is no text to train a tokenizer of kind {kind!r} on; give one with --processor.path")
    if kind != "byte_bpe":
        _check_size(kind, vocab_size, num_fixed + len(characters))


def _check_size(kind: Kind, vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise UserError(
            f"processor.vocab_size={vocab_size} cannot hold the special tokens, tags and alphabet of kind {kind!r}; "
            f"give at least {least}"
        )


def _without(text: str, tags: Sequence[str]) -> str:
    """The text without the tag that it begins with."""
    return next((text.removeprefix(tag) for tag in tags if text.startswith(tag)), text)
