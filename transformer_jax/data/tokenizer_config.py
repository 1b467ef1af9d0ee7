"""What a run says of its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from transformer_jax.data.tokenizer_training import Kind
from transformer_jax.errors import UserError


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
    add_begin: bool | None = None
    """Put the begin token before a prompt that a language model continues; None does so if the training documents
    begin with it. GPT-2's checkpoints do not, Llama's do."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"tokenizer.kind={self.kind!r} is not known; choose among {', '.join(get_args(Kind))}")
        for name in ("vocab_size", "max_records"):
            if getattr(self, name) < 1:
                raise UserError(f"tokenizer.{name} must be at least 1; got {getattr(self, name)}")
