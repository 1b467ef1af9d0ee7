"""Text to ids and back: a thin layer over the `tokenizers` library, with its special ids named."""

import hashlib
import warnings
from collections.abc import Iterable, Sequence, Set
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders

from transformer_jax.atomic import atomic
from transformer_jax.data.allowed_tokens import with_allowed
from transformer_jax.data.encoded import (
    Encoded,
    EncodedSpans,
    EncodedWords,
    Padding,
    encode_batch,
    encode_spans,
    group_by_word,
    joined,
    pad,
    with_template,
)
from transformer_jax.data.special_tokens import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    WELL_KNOWN,
    special_id,
    special_tokens,
    unknown_id,
)
from transformer_jax.data.tokenizer_config import FILE, TokenizerConfig
from transformer_jax.data.tokenizer_training import learn
from transformer_jax.errors import UserError

WORD_BEGINS = (" ", "Ġ", "▁", "\n", "Ċ")
"""How the tokens that begin a word begin: with a space, or what stands for it."""


class Tokenizer:
    """Text to ids and back. Special tokens in a text are read as plain characters, unless the caller allows them."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, config: TokenizerConfig | None = None, *, tags: Sequence[str] = ()
    ):
        config = config or TokenizerConfig()
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_id = special_id(tokenizer, "end", config.end)
        self.begin_id = special_id(tokenizer, "begin", config.begin, otherwise=self.end_id)
        self.pad_id = special_id(tokenizer, "pad", config.pad)
        self.unknown_id = unknown_id(tokenizer, config.unknown)
        self.add_begin = config.add_begin
        # Tags are ordinary added tokens: unlike special ones they are found in text.
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        self._special_ids = set(special_tokens(tokenizer).values())
        self._forget_copies()
        self._check_tags(tags)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._identity == other._identity

    def __hash__(self) -> int:  # tasks are static under `jit`: equal tokenizers share what was compiled
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, bool | None]:
        return self.fingerprint, self.add_begin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the library forgets it when pickled
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._allowing: dict[frozenset[str], tokenizers.Tokenizer] = {}
        self._template: tuple[int | None, tokenizers.Tokenizer] | None = None

    @classmethod
    def train(cls, texts: Iterable[str], config: TokenizerConfig, *, tags: Sequence[str] = ()) -> "Tokenizer":
        """Learn one from texts, read once. Digits stay apart; a word takes the space before it; tags stay whole."""
        names = [config.pad or PAD, config.begin or BEGIN, config.end or END]
        if config.unknown or config.kind not in ("byte_bpe", "bytes"):
            names.append(config.unknown or UNKNOWN)
        for name in (names[0], *names[3:]):
            if names.count(name) > 1:
                raise UserError(f"the special tokens {', '.join(names)} name {name} twice; give it one meaning")
        special = list(dict.fromkeys(names))  # begin and end may be one token
        return cls(learn(texts, config.kind, config.vocab_size, special, tags), config, tags=tags)

    @classmethod
    def load(cls, path: Path, config: TokenizerConfig | None = None, *, tags: Sequence[str] = ()) -> "Tokenizer":
        """A tokenizer that was saved, here or by others; the config names its special tokens where that is needed."""
        if not path.is_file():
            hint = "it is a folder; name the tokenizer.json in it" if path.is_dir() else "name a tokenizer.json"
            raise UserError(f"there is no tokenizer at {path}; {hint}")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error
        return cls(tokenizer, config, tags=tags)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into a run's folder, all or nothing."""
        self.save_file(folder / FILE)

    def save_file(self, path: Path) -> None:
        """Write it to a file of any name, all or nothing."""
        with atomic(path) as unfinished:
            self._tokenizer.save(str(unfinished))

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, from 0 to the last."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of all that decides what text becomes, for caches."""
        special_ids = (self.pad_id, self.begin_id, self.end_id, self.unknown_id)
        content = f"{special_ids} {self._tokenizer.to_str()}"
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    @property
    def begins_texts(self) -> bool:
        """Whether the tokenizer's own file puts the begin token before a text, as that of Llama does."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
        return whole != plain and whole[:1] == [self.begin_id]

    def with_begin(self, add_begin: bool) -> "Tokenizer":
        """The same tokenizer for a language model whose prompts begin with the begin token, or do not."""
        other = copy(self)
        other.add_begin = add_begin
        return other

    def with_config(self, config: TokenizerConfig) -> "Tokenizer":
        """The same tokenizer with the special tokens that another config names."""
        return Tokenizer(tokenizers.Tokenizer.from_str(self._tokenizer.to_str()), config)

    @cached_property
    def mask_token(self) -> str | None:
        """The token that stands for one to be predicted; None where the tokenizer has none."""
        return next((token for token in WELL_KNOWN["mask"] if self.find(token) is not None), None)

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token."""
        return None if self.mask_token is None else self.find(self.mask_token)

    @cached_property
    def spaces_begin_words(self) -> bool:
        """Whether a space is part of the token after it, as in "▁word", and none of its own, as with characters."""
        space, words = self.encode([" ", "a a"])
        return not set(space) & set(words)

    def encode(self, texts: Sequence[str], *, allow: Sequence[str] = ()) -> list[list[int]]:
        """The ids of each text, without begin and end.

        Args:
            texts: What to encode.
            allow: Special tokens that are found in the texts, for a prompt that somebody wrote; all others are plain
                characters. Both "[MASK]" and "<mask>" mean the tokenizer's mask, whichever of them it has; where a
                space begins words, the one before a mask is part of what is masked.
        """
        if not allow:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [self._without_special(encoding.ids) for encoding in encodings]
        tokens = {name: self._allowed(name) for name in allow}
        for name, token in tokens.items():
            texts = [text.replace(name, token) for text in texts]
        encodings = self._finding(frozenset(tokens.values())).encode_batch_fast(list(texts), add_special_tokens=False)
        ids = {id for id in map(self.find, tokens.values()) if id is not None}
        return [self._without_special(encoding.ids, allowed=ids) for encoding in encodings]

    def __call__(
        self,
        texts: str | Sequence[str],
        pairs: str | Sequence[str] | None = None,
        *,
        padding: Padding = True,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> Encoded:
        """A batch for a model: `input_ids`, `attention_mask` and `token_type_ids`.

        Special tokens are put where the tokenizer's file has them, [CLS] a [SEP] b [SEP] for BERT's; where it says
        nothing, a text stands between begin and end, and its pair before another end.

        Args:
            texts: what to encode; a single string is a batch of one.
            pairs: a second text for each.
            padding: on the right to the longest, or to "max_length"; False gives lists instead of arrays.
            max_length: most tokens of a row; a longer one is cut, of a pair the longer text first. None cuts nothing.
            add_special_tokens: whether to add any.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        pairs = [pairs] if isinstance(pairs, str) else pairs
        if pairs is not None and len(pairs) != len(texts):
            raise UserError(f"there are {len(texts)} texts but {len(pairs)} pairs; give one for each")
        tokenizer = self._with_template(max_length)
        least = tokenizer.num_special_tokens_to_add(pairs is not None) if add_special_tokens else 0
        if max_length is not None and max_length < least:
            raise UserError(f"max_length={max_length} cannot hold the {least} special tokens of a row; give more")
        rows = encode_batch(
            tokenizer, texts, pairs, self._special_ids, self.unknown_id, add_special_tokens=add_special_tokens
        )
        return pad(rows, self.pad_id, padding, max_length)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[EncodedSpans]:
        """The ids of each text, without begin and end, and the characters and the word that each id comes from."""
        return encode_spans(self._tokenizer, texts, self._special_ids, self.unknown_id)

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[EncodedWords]:
        """The ids of texts that are given as words, without begin and end, and the index of the word of each id.

        The words are encoded as the text that they make with a space between each two, which is what the tokenizer was
        trained on. A word that is empty or of spaces has no id, nor has one of characters that the tokenizer removes.
        """
        spans = self.encode_with_offsets([joined(words) for words in sentences])
        return [group_by_word(words, found) for words, found in zip(sentences, spans, strict=True)]

    def warn_if_unknown(self, rows: Iterable[Sequence[int] | np.ndarray], what: str, *, share: float = 0.5) -> None:
        """Warn, once for all of them, of encoded texts that have at least this share of unknown tokens.

        Args:
            rows: The ids of texts, as `encode` gives them; or one array with those of many.
            what: What each row is, such as "text", for the warning.
            share: Of the tokens of a row.
        """
        if self.unknown_id is None:
            return
        counts = [(int(np.sum(np.asarray(row) == self.unknown_id)), len(row)) for row in rows]
        found = [(unknown, total) for unknown, total in counts if unknown and unknown >= share * total]
        if found:
            unknown, total = map(sum, zip(*found, strict=True))
            warnings.warn(
                f"{unknown} of {total} tokens are unknown to the tokenizer ({self.tokens([self.unknown_id])[0]}) in "
                f"{len(found)} of {len(counts)} {what}; check its language, its upper and lower case, and that the "
                "tokenizer is that of the model",
                stacklevel=3,
            )

    def decode(self, ids: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """The text of each sequence of ids; special ones are left out."""
        return self._tokenizer.decode_batch([list(sequence) for sequence in ids], skip_special_tokens=True)

    def vocabulary(self) -> list[str]:
        """Each token as it is stored, by its id; "" for an id that has none."""
        return [self._tokenizer.id_to_token(id) or "" for id in range(self.vocab_size)]

    def find(self, *tokens: str) -> int | None:
        """The id of the first of these tokens that there is."""
        return next((id for id in map(self._tokenizer.token_to_id, tokens) if id is not None), None)

    def continues(self) -> np.ndarray:
        """For each id, whether its token goes on with the word of the one before: "##ing", or "ing" without a space."""
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        inner = [
            token.startswith(prefix) if prefix else not token.startswith(WORD_BEGINS) for token in self.vocabulary()
        ]
        return np.array([is_inner and id not in self._special_ids for id, is_inner in enumerate(inner)])

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as its token, for people to see."""
        return [self._token(int(id)) or UNKNOWN for id in ids]

    def _token(self, id: int) -> str | None:
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):  # whose tokens have a letter for each byte
            return self._tokenizer.decode([id], skip_special_tokens=False)
        return self._tokenizer.id_to_token(id)

    def _without_special(self, ids: list[int], *, allowed: Set[int] = frozenset()) -> list[int]:
        """The ids of a text, a special one made unknown: where these are among its pieces, a model (T5) finds them."""
        special = self._special_ids - allowed
        if special.isdisjoint(ids):
            return ids
        unknown = [] if self.unknown_id is None else [self.unknown_id]
        return [plain for id in ids for plain in (unknown if id in special else [id])]

    def _allowed(self, name: str) -> str:
        """The token that a name in `allow` stands for."""
        token = self.mask_token if name in WELL_KNOWN["mask"] and self.find(name) is None else name
        if token is None or self.find(token) is None:
            special = ", ".join(special_tokens(self._tokenizer)) or "it has none"
            raise UserError(f"allow={name!r} is not a token of the tokenizer; name a special token of it: {special}")
        return token

    def _finding(self, tokens: frozenset[str]) -> tokenizers.Tokenizer:
        """The tokenizer of the library that finds these tokens in a text."""
        if tokens not in self._allowing:
            takes_space = {token: token == self.mask_token and self.spaces_begin_words for token in sorted(tokens)}
            self._allowing[tokens] = with_allowed(self._tokenizer, takes_space)
        return self._allowing[tokens]

    def _with_template(self, max_length: int | None) -> tokenizers.Tokenizer:
        """The tokenizer of the library that adds special tokens and cuts; of the copies the last is kept."""
        if self._tokenizer.post_processor is not None and max_length is None:
            return self._tokenizer
        kept = self._template  # read once: other threads may ask for another length
        if kept is None or kept[0] != max_length:
            kept = self._template = (
                max_length,
                with_template(self._tokenizer, self.begin_id, self.end_id, max_length),
            )
        return kept[1]

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag, ids in zip(tags, self.encode(tags), strict=True):
            if len(ids) != 1 or self.decode([ids]) != [tag]:
                raise UserError(f"the tag {tag!r} does not survive this tokenizer; name it like <de>, in plain letters")
