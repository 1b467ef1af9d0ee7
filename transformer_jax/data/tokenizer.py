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
from transformer_jax.data.tokenizer_config import TokenizerConfig
from transformer_jax.data.tokenizer_training import learn
from transformer_jax.errors import UserError

PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"

WELL_KNOWN = {
    "pad": (PAD, "[PAD]"),
    "begin": (BEGIN, "[CLS]", "<bos>", "<|endoftext|>"),
    "end": (END, "[SEP]", "<eos>", "<|endoftext|>"),
    "unknown": (UNKNOWN, "[UNK]"),
    "mask": ("[MASK]", "<mask>"),
}
"""The names that published tokenizers give their special tokens, ours first."""

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
        self.end_id = self._special_id("end", config.end)
        self.begin_id = self._special_id("begin", config.begin, otherwise=self.end_id)
        self.pad_id = self._special_id("pad", config.pad)
        self.unknown_id = self._unknown_id(config.unknown)
        self.add_begin = config.add_begin
        # Tags are ordinary added tokens: unlike special ones they are found in text.
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        self._special_ids = set(self._special_tokens().values())
        self._allowing: dict[frozenset[str], tokenizers.Tokenizer] = {}
        self._check_tags(tags)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the library forgets it when pickled
        self._allowing = {}

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

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, all or nothing."""
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

    def _special_tokens(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def _special_id(self, role: str, name: str | None, *, otherwise: int | None = None) -> int:
        """The id of the token that is named, or else known, to have this role; it is made special if it is not."""
        special = self._special_tokens()
        name = name or next((known for known in WELL_KNOWN[role] if known in special), None)
        if name is not None:
            self._tokenizer.add_special_tokens([name])
            return self._special_tokens()[name]
        if otherwise is not None:
            return otherwise
        raise UserError(
            f"the tokenizer has no {role} token that is known; name it with --tokenizer.{role} TOKEN: "
            f"one of its special tokens ({', '.join(special) or 'it has none'}) or a new one, which is added"
        )

    def _unknown_id(self, name: str | None) -> int | None:
        """The id of the token that is named, or that the model says, or that is known; None where there is none."""
        known = next((known for known in WELL_KNOWN["unknown"] if known in self._special_tokens()), None)
        found = name or getattr(self._tokenizer.model, "unk_token", None) or known
        id = None if found is None else self._tokenizer.token_to_id(found)
        if name is not None and id is None:
            raise UserError(f"tokenizer.unknown={name!r} is not a token of the tokenizer; name one that is, or none")
        return id

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
            special = ", ".join(self._special_tokens()) or "it has none"
            raise UserError(f"allow={name!r} is not a token of the tokenizer; name a special token of it: {special}")
        return token

    def _finding(self, tokens: frozenset[str]) -> tokenizers.Tokenizer:
        """The tokenizer of the library that finds these tokens in a text."""
        if tokens not in self._allowing:
            takes_space = {token: token == self.mask_token and self.spaces_begin_words for token in sorted(tokens)}
            self._allowing[tokens] = with_allowed(self._tokenizer, takes_space)
        return self._allowing[tokens]

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag, ids in zip(tags, self.encode(tags), strict=True):
            if len(ids) != 1 or self.decode([ids]) != [tag]:
                raise UserError(f"the tag {tag!r} does not survive this tokenizer; name it like <de>, in plain letters")
