"""A config without its data: a tokenizer and texts that stand in for its own, so that the shapes of a run are known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from transformer_jax.data import Batches, Source, Split, Store, Tokenizer, TokenizerConfig
from transformer_jax.data.batches import Batch
from transformer_jax.data.source import FirstRecords
from transformer_jax.data.special_tokens import BEGIN, END, PAD, UNKNOWN
from transformer_jax.errors import UserError
from transformer_jax.tasks import Task, TaskConfig
from transformer_jax.training.config import Config
from transformer_jax.training.examples import records_of
from transformer_jax.training.resolve import resolve_new

WORD = "a"
LENGTH = 512  # tokens of a text for a model without a longest
NUM_TEXTS = 8  # of each length
NUM_RECORDS = 256  # of the real data, where nothing can stand in for them
SHORT = ("question", "answer")  # texts that a row has beside a long one
LABELS = {"label", "tags"}


@dataclass(frozen=True)
class StandIn:
    """A config with nothing left open, although its data were not read."""

    config: Config
    """What `resolve_new` gives, with texts of equal words for data."""
    processor: Any
    assumptions: tuple[str, ...]
    """What was taken for granted, in plain sentences."""

    @classmethod
    def of(cls, config: Config, dtype: str) -> "StandIn":
        """Resolve a config.

        Args:
            config: what would be trained.
            dtype: what a precision of "auto" is on the devices that it would be trained on.
        """
        model = config.model
        if model is None or config.init_from is not None:
            raise UserError(
                "init_from decides the sizes of the model; leave it out, and give them with a config or with flags "
                "such as --model.num-layers"
            )
        if getattr(model, "dtype", None) == "auto":
            config = replace(config, model=replace(model, dtype=dtype))  # type: ignore[call-arg]
        if not _can_stand_in(config):
            resolved, processor = resolve_new(config, None)
            data = FirstRecords(config.data, NUM_RECORDS)
            return cls(replace(resolved, data=data), processor, (f"rows are those of {NUM_RECORDS} of the records",))
        assumptions = ["no data were read: texts are as long as the model and the batching allow"]
        processor = None if config.processor is None else _processor(config)
        if processor is not None and config.processor.path is None:  # type: ignore[union-attr]
            assumptions.append(f"the tokenizer has all the {processor.vocab_size:,} ids that it may have")
        num_labels = getattr(model, "num_labels", None) or 2
        if LABELS & set(config.task.fields):
            assumptions.append(f"there are {num_labels} labels")
        texts = _texts(config, processor)
        records = [_record(config.task, text, number % num_labels) for number, text in enumerate(texts)]
        tags = config.data.tags()
        config = replace(config, data=_Texts(tuple(records), config.task.fields, tags))
        resolved, processor = resolve_new(config, None, processor)
        return cls(resolved, processor, tuple(assumptions))

    def batches(self, task: Task, multiple: int) -> list[Batch]:
        """A batch of each shape that training would compile, in rows of a multiple of this number."""
        records = records_of(self.config, "train")
        examples = Store.of(task.encode([records[number] for number in range(len(records))]), task.columns)
        batches = [batch for _, batch in Batches(task.layout(examples, training=True), multiple=multiple).once()]
        return [*{tuple(array.shape for array in batch.values()): batch for batch in batches}.values()]


def _can_stand_in(config: Config) -> bool:
    """Whether all that the task reads of a record is text or labels, and a tokenizer reads it."""
    task = config.task
    known = {*task.text_fields, *task.word_fields, *LABELS}
    return set(task.fields) <= known and bool(task.fields) and isinstance(config.processor, TokenizerConfig)


def _processor(config: Config) -> Tokenizer:
    """The tokenizer that the config names, or one of as many words as the one that would be trained may have ids."""
    settings, tags = config.processor, config.data.tags()
    assert isinstance(settings, TokenizerConfig)
    if settings.path is not None:
        return Tokenizer.load(settings.path, settings, tags=tags)
    special = [settings.pad or PAD, settings.begin or BEGIN, settings.end or END]
    if settings.unknown or settings.kind not in ("byte_bpe", "bytes"):
        special.append(settings.unknown or UNKNOWN)
    special = [*dict.fromkeys(special)]
    size = len(special) + 256 if settings.kind == "bytes" else settings.vocab_size - len(tags)
    words = [*special, WORD, *(f"word{number}" for number in range(size - len(special) - 1))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=special[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Tokenizer(tokenizer, settings, tags=tags)


def _texts(config: Config, processor: Any) -> list[str]:
    """Texts of the most tokens that fit a model and, where examples are packed, of the most that are."""
    longest = getattr(config.model, "max_length", None) or config.batching.pack_length or LENGTH
    lengths = {longest - 1, min(longest - 1, (config.batching.pack_length or longest) - 2)}
    return [_text(max(length, 1), processor) for length in sorted(lengths) for _ in range(NUM_TEXTS)]


def _text(length: int, processor: Any) -> str:
    """A text of so many tokens."""
    text = " ".join([WORD] * length)
    found = len(processor.encode([text])[0]) if processor is not None else length
    return text if found <= length else " ".join([WORD] * max(1, length * length // found))


def _record(task: TaskConfig, text: str, label: int) -> dict[str, str]:
    values = {"label": str(label), "tags": " ".join([str(label)] * len(text.split()))}
    return {field: values.get(field, WORD if field in SHORT else text) for field in task.fields}


@dataclass(frozen=True)
class _Texts(Source[Any]):
    """Records in memory, the same for every split."""

    records: tuple[dict[str, str], ...]
    names: tuple[str, ...]
    words: tuple[str, ...]

    def split(self, name: Split) -> Sequence[Any]:
        return self.records

    def fields(self) -> tuple[str, ...]:
        return self.names

    def tags(self) -> tuple[str, ...]:
        return self.words
