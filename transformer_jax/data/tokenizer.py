"""Text to ids and back: a thin layer over the `tokenizers` library, with its special ids named."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders

from transformer_jax.data.tokenizer_training import Kind, learn
from transformer_jax.errors import UserError

PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"

WELL_KNOWN = {
    "pad": (PAD, "[PAD]"),
    "begin": (BEGIN, "[CLS]", "<bos>", "<|endoftext|>"),
    "end": (END, "[SEP]", "<eos>", "<|endoftext|>"),
    "unknown": (UNKNOWN, "[UNK]"),
}
"""The names that published tokenizers give their special tokens, ours first."""

WORD_BEGINS = (" ", "Ġ", "▁", "\n", "Ċ")
"""How the tokens that begin a word begin: with a space, or what stands for it."""


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer, trained on the training text or loaded from a file."""

    vocab_size: int = 512
    """Most tokens to learn, with the alphabet, special tokens and tags. Too few for these is an error that says how
    many they take."""
    kind: Kind = "bpe"
    """How text becomes tokens. bpe merges characters and byte_bpe merges bytes into frequent pieces; unigram takes the
    likeliest pieces and wordpiece the longest; characters and bytes take them one by one. byte_bpe, bytes and unigram
    write every text; the others write the characters that they were trained on, and the rest is unknown."""
    path: Path | None = None
    """A tokenizer.json to load instead of training one."""
    max_records: int = 1_000_000
    """Most training records to learn from, evenly spaced over the set."""
    pad: str | None = None
    """The padding token; None is <pad>, or for a loaded tokenizer [PAD]. Here and below, a name that a loaded one lacks
    is added to it. With the name of the end token, a loss that leaves out the padding leaves out the end."""
    begin: str | None = None
    """The token before a text; None is <s>, or for a loaded tokenizer [CLS], <|endoftext|> or its end token."""
    end: str | None = None
    """The token after a text; None is </s>, or for a loaded tokenizer [SEP] or <|endoftext|>."""
    unknown: str | None = None
    """The token for what cannot be written; None is <unk>, or what a loaded tokenizer has. Bytes need none."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"tokenizer.kind={self.kind!r} is not known; choose among {', '.join(get_args(Kind))}")
        for name in ("vocab_size", "max_records"):
            if getattr(self, name) < 1:
                raise UserError(f"tokenizer.{name} must be at least 1; got {getattr(self, name)}")


class Tokenizer:
    """Text to ids and back. Special tokens in a text are read as plain characters, never as what they mean."""

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
        # Tags are ordinary added tokens: unlike special ones they are found in text.
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        self._special_ids = set(self._special_tokens().values())
        self._check_tags(tags)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True  # the library forgets it when pickled

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
        partial = path.with_suffix(".partial")
        self._tokenizer.save(str(partial))
        partial.replace(path)

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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._without_special(encoding.ids) for encoding in encodings]

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

    def _without_special(self, ids: list[int]) -> list[int]:
        """The ids of a text, a special one made unknown: where these are among its pieces, a model (T5) finds them."""
        if self._special_ids.isdisjoint(ids):
            return ids
        unknown = [] if self.unknown_id is None else [self.unknown_id]
        return [plain for id in ids for plain in (unknown if id in self._special_ids else [id])]

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag, ids in zip(tags, self.encode(tags), strict=True):
            if len(ids) != 1 or self.decode([ids]) != [tag]:
                raise UserError(f"the tag {tag!r} does not survive this tokenizer; name it like <de>, in plain letters")
