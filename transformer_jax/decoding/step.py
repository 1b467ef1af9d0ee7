"""What every decoding strategy shares: a step function, and the state that it carries."""

from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

State = TypeVar("State", bound="Reorderable")


class Reorderable(Protocol):
    """The state that a step function carries: a pytree whose rows can be repeated for beams and reordered."""

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""

    def repeat(self: State, count: int) -> State:
        """Each row `count` times, next to each other."""

    def reorder(self: State, rows: Int[Array, "B"]) -> State:
        """The state with other rows in place of its own, each of the same source."""


class Step(Protocol):
    """The next tokens of each row and the state before them, to the logits after each and the state after them."""

    def __call__(self, tokens: Int[Array, "B T"], state: Any, /) -> tuple[Float[Array, "B T V"], Any]: ...


def row_limits(
    state: Reorderable, prompt: Int[Array, "B P"], length: int, limits: Int[Array, "B"] | None
) -> Int[Array, "B"]:
    """How many tokens each row may get: its own limit, at most `length`, for which the state must have room."""
    num_rows, prompt_length = prompt.shape
    needed = prompt_length + length - 1  # the last token is never read
    if needed > state.capacity:
        raise ValueError(
            f"a prompt of {prompt_length} and {length} new tokens need room for {needed}; "
            f"the cache holds {state.capacity}"
        )
    return jnp.full(num_rows, length) if limits is None else jnp.minimum(limits, length)


def prefill(step: Step, state: Any, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B 1"], Any]:
    """Run all of the prompt but its last token, which is what the first step is given."""
    if prompt.shape[1] > 1:
        _, state = step(prompt[:, :-1], state)
    return prompt[:, -1:], state
