"""Text to ids and back: a thin layer over the `tokenizers` library, with its special ids named."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from transformer_jax.errors import UserError

PAD, BEGIN, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"


@dataclass(frozen=True)
class TokenizerConfig:
    """A subword tokenizer, trained on the training text."""

    vocab_size: int = 512
    """Most tokens to learn, characters and special tokens included. Fewer than the characters gives characters."""


class Tokenizer:
    """Text to ids and back. Special tokens in a text are read as plain characters, never as what they mean."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.pad_id, self.begin_id, self.end_id, self.unknown_id = map(self._id, (PAD, BEGIN, END, UNKNOWN))

    @classmethod
    def train(cls, texts: Iterable[str], config: TokenizerConfig, *, tags: Sequence[str] = ()) -> "Tokenizer":
        """Byte-pair encoding of characters. Digits stay apart; a word takes the space before it; tags stay whole."""
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=UNKNOWN))
        pieces = Regex(r"\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size - len(tags), special_tokens=[PAD, BEGIN, END, UNKNOWN], show_progress=False
        )
        tokenizer.train_from_iterator((_without(text, tags) for text in texts), trainer)
        # Tags are ordinary added tokens: unlike special ones they are found in text.
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """A tokenizer that was saved."""
        if not path.is_file():
            raise UserError(f"there is no tokenizer at {path}")
        return cls(tokenizers.Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, all or nothing."""
        partial = path.with_suffix(".partial")
        self._tokenizer.save(str(partial))
        partial.replace(path)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids; special ones are left out."""
        return self._tokenizer.decode_batch([list(sequence) for sequence in ids], skip_special_tokens=True)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as its token, for people to see."""
        return [self._tokenizer.id_to_token(int(id)) or UNKNOWN for id in ids]

    def _id(self, token: str) -> int:
        id = self._tokenizer.token_to_id(token)
        if id is None:
            raise UserError(f"the tokenizer has no {token} token")
        return id


def _without(text: str, tags: Sequence[str]) -> str:
    """The text without the tag that it begins with."""
    return next((text.removeprefix(tag) for tag in tags if text.startswith(tag)), text)
