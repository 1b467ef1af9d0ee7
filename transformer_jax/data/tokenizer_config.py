"""What a run says of its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from transformer_jax.data.encoded import joined
from transformer_jax.data.processor import ProcessorConfig
from transformer_jax.data.tokenizer_training import Kind
from transformer_jax.errors import UserError

if TYPE_CHECKING:
    from transformer_jax.data.tokenizer import Tokenizer

FILE = "tokenizer.json"


@dataclass(frozen=True)
class TokenizerConfig(ProcessorConfig):
    """A tokenizer, trained on the training text or loaded from a file."""

    vocab_size: int = 512
    """Most tokens of a tokenizer that is trained, with its alphabet, special tokens and tags; too few for these is an
    error that says how many they take."""
    kind: Kind = "bpe"
    """How text becomes tokens. bpe merges characters and byte_bpe merges bytes into frequent pieces; unigram takes the
    likeliest pieces and wordpiece the longest; characters and bytes take them one by one. byte_bpe, bytes and unigram
    write every text; the others write the characters that they were trained on, and the rest is unknown."""
    path: Path | None = None
    """A tokenizer.json to load instead of training a tokenizer."""
    max_records: int = 1_000_000
    """Most training records to train the tokenizer on, evenly spaced over the set."""
    pad: str | None = None
    """The padding token, which is added to a loaded tokenizer that lacks it; None is <pad>, or for a loaded tokenizer
    [PAD]. If it is the end token, a loss that leaves out the padding leaves out the end."""
    begin: str | None = None
    """The token before a text, which is added to a loaded tokenizer that lacks it; None is <s>, or for a loaded
    tokenizer [CLS], <|endoftext|> or its end token."""
    end: str | None = None
    """The token after a text, which is added to a loaded tokenizer that lacks it; None is </s>, or for a loaded
    tokenizer [SEP] or <|endoftext|>."""
    unknown: str | None = None
    """The token for text that the tokenizer has no other token for; None is <unk>, or what a loaded tokenizer has. The
    kinds byte_bpe and bytes need none."""
    add_begin: bool | None = None
    """Put the begin token before a prompt that a language model continues; None does so if the training documents
    begin with it. GPT-2's checkpoints do not, Llama's do."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"processor.kind={self.kind!r} is not known; choose among {', '.join(get_args(Kind))}")
        for name in ("vocab_size", "max_records"):
            if getattr(self, name) < 1:
                raise UserError(f"processor.{name} must be at least 1; got {getattr(self, name)}")

    def learn(
        self, records: Sequence[Mapping[str, Any]], text_fields: Sequence[str], *, tags: Sequence[str] = ()
    ) -> "Tokenizer":
        """The tokenizer of a new run: loaded from `path`, or trained on the texts of at most `max_records` records."""
        from transformer_jax.data.tokenizer import Tokenizer  # which needs this module

        if self.path is not None:
            return Tokenizer.load(self.path, self, tags=tags)
        if not text_fields:
            raise UserError("the task has no text to train a tokenizer on; give one with --processor.path")
        count = min(len(records), self.max_records)
        chosen = (records[number * len(records) // count] for number in range(count))
        values = (record[field] for record in chosen for field in text_fields)
        texts = (value if isinstance(value, str) else joined(value) for value in values)
        return Tokenizer.train(texts, self, tags=tags)

    def load(self, folder: Path) -> "Tokenizer":
        """The tokenizer that was saved in a run's folder."""
        from transformer_jax.data.tokenizer import Tokenizer

        return Tokenizer.load(folder / FILE, self)
