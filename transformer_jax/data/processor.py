"""What a run encodes records with, besides its task: a tokenizer is one kind of processor."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Processor(Protocol):
    """What was learned from the training set, such as a vocabulary or the mean of audio features."""

    def save(self, folder: Path) -> None:
        """Write it to a run's folder."""


class ProcessorConfig(ABC):
    """The settings of a processor, as part of the config of a run. Subclasses are frozen dataclasses."""

    @abstractmethod
    def learn(
        self, records: Sequence[Mapping[str, Any]], text_fields: Sequence[str], *, tags: Sequence[str] = ()
    ) -> Any:
        """The processor of a new run, from its training set.

        Args:
            records: of the training set.
            text_fields: the fields of a record that are texts, or lists of words.
            tags: words that a text may begin with, each of which has a meaning of its own.
        """

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """The processor that was saved in a run's folder."""
