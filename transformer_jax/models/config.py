"""The base of every model's config."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A frozen dataclass that says all of a model but its weights. `config.build(nnx.Rngs(0))` makes the model.

    A config of your own derives from this, adds its fields and says how its model is built; nothing here lists the
    configs that there are. Its values must be hashable, for a model keeps its config.
    """

    adjustable: ClassVar[tuple[str, ...]] = ()
    """Fields that change neither the shape nor the meaning of any weight, so that a run may set them otherwise than the
    checkpoint that it starts from."""

    @abstractmethod
    def build(self, rngs: nnx.Rngs) -> Any:
        """The model of this config, initialized with keys of `rngs`."""
