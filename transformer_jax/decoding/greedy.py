"""Greedy decoding: the likeliest next token, each time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.step import Step, prefill, row_limits
from transformer_jax.functional import log_softmax


class Greedy(NamedTuple):
    """What was generated after the prompt. Beyond `lengths` there is nothing but the end id."""

    tokens: Int[Array, "B length"]
    lengths: Int[Array, "B"]
    """Tokens before the end token; all of them when it never came."""
    scores: Float[Array, "B"]
    """Log-probability, the end token's included."""


def greedy(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    *,
    length: int,
    limits: Int[Array, "B"] | None = None,
    end_id: int,
) -> Greedy:
    """Continue each prompt by at most `length` tokens, and by no more than its own limit, until all have ended."""
    limits = row_limits(state, prompt, length, limits)
    num_rows = prompt.shape[0]

    def unfinished(carry):
        index, _, _, _, _, lengths = carry
        return jnp.any((index < limits) & (lengths == limits))

    def advance(carry):
        index, last, state, tokens, scores, lengths = carry
        logits, state = step(last, state)
        log_probabilities = log_softmax(logits[:, -1])
        ended = (lengths < limits) | (index >= limits)
        token = jnp.where(ended, end_id, jnp.argmax(log_probabilities, axis=-1))
        score = jnp.take_along_axis(log_probabilities, token[:, None], axis=-1)[:, 0]
        scores = scores + jnp.where(ended, 0, score)
        lengths = jnp.where(~ended & (token == end_id), index, lengths)
        return index + 1, token[:, None], state, tokens.at[:, index].set(token), scores, lengths

    last, state = prefill(step, state, prompt)
    carry = (
        jnp.int32(0),
        last,
        state,
        jnp.full((num_rows, length), end_id, prompt.dtype),
        jnp.zeros(num_rows),
        limits,
    )
    _, _, _, tokens, scores, lengths = jax.lax.while_loop(unfinished, advance, carry)
    return Greedy(tokens, lengths, scores)
