"""Beam search with a length penalty (Wu et al. 2016, section 7), live and finished beams kept apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.step import Step, prefill, row_limits
from transformer_jax.functional import log_softmax


class Beams(NamedTuple):
    """The best continuations of each prompt, best first: finished ones, then, where there are too few, unfinished."""

    tokens: Int[Array, "B K length"]
    lengths: Int[Array, "B K"]
    """Tokens before the end token; all of them when it never came."""
    scores: Float[Array, "B K"]
    """Log-probability divided by the length penalty."""


def length_penalty(length: Int[Array, "..."] | int, alpha: float) -> Float[Array, "..."]:
    """((5 + n) / 6)^alpha, where n counts the generated tokens, the end token included."""
    return ((5.0 + jnp.asarray(length)) / 6.0) ** alpha


def beam_search(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    *,
    length: int,
    limits: Int[Array, "B"] | None = None,
    end_id: int,
    num_beams: int,
    alpha: float,
    num_results: int | None = None,
) -> Beams:
    """The likeliest ways to continue each prompt, by at most `length` tokens and by no more than its own limit.

    A hypothesis with its end token leaves the beam with its final score; a live one goes on. The search ends when no
    live one can be among the results any more, even at the length that favours it most: the fewer results are asked
    for (as many as there are beams by default), the sooner.
    """
    num_results = num_beams if num_results is None else num_results
    limits = row_limits(state, prompt, length, limits)
    num_rows = prompt.shape[0]
    last_penalty = length_penalty(limits, alpha)

    def rows_of(beams: Array) -> Array:
        return (jnp.arange(num_rows)[:, None] * num_beams + beams).reshape(-1)

    def unfinished(carry):
        index, _, _, live, finished = carry
        best_live = live.scores[:, 0]
        reachable = jnp.maximum(best_live / length_penalty(index + 1, alpha), best_live / last_penalty)
        return jnp.any((index < limits) & (reachable > finished.scores[:, num_results - 1]))

    def advance(carry):
        index, last, state, live, finished = carry
        logits, state = step(last, state)
        log_probabilities = log_softmax(logits[:, -1]).reshape(num_rows, num_beams, -1)
        vocab_size = log_probabilities.shape[-1]
        totals = (live.scores[:, :, None] + log_probabilities).reshape(num_rows, -1)
        # Each beam has one end token, so twice as many candidates leave enough that go on.
        scores, choices = jax.lax.top_k(totals, min(2 * num_beams, num_beams * vocab_size))
        parents, token = choices // vocab_size, choices % vocab_size
        tokens = jnp.take_along_axis(live.tokens, parents[:, :, None], axis=1).at[:, :, index].set(token)
        ends = token == end_id

        ended = Beams(tokens, jnp.full_like(parents, index), scores / length_penalty(index + 1, alpha))
        ended = _best(_concatenate(finished, _only(ended, ends)), num_beams)
        unended = Beams(tokens, jnp.broadcast_to(limits[:, None], parents.shape), scores)
        going_on, kept = _best_with_indices(_only(unended, ~ends), num_beams)
        parents, token = (jnp.take_along_axis(x, kept, axis=1) for x in (parents, token))
        state = state.reorder(rows_of(parents))
        within = index < limits
        return index + 1, token.reshape(-1, 1), state, _where(within, going_on, live), _where(within, ended, finished)

    last, state = prefill(step, state, prompt)
    nothing = Beams(
        jnp.full((num_rows, num_beams, length), end_id, prompt.dtype),
        jnp.broadcast_to(limits[:, None], (num_rows, num_beams)),
        jnp.full((num_rows, num_beams), -jnp.inf),
    )
    # All beams start equal: only the first may have children, or they would all have the same.
    live = nothing._replace(scores=nothing.scores.at[:, 0].set(0.0))
    carry = (jnp.int32(0), jnp.repeat(last, num_beams, axis=0), state.repeat(num_beams), live, nothing)
    _, _, _, live, finished = jax.lax.while_loop(unfinished, advance, carry)

    live = live._replace(scores=live.scores / last_penalty[:, None])
    everything = _concatenate(finished, live)
    is_live = jnp.arange(2 * num_beams)[None, :] >= num_beams
    rank = jnp.where(everything.scores == -jnp.inf, 2, jnp.where(is_live, 1, 0))
    return _take(everything, jnp.lexsort((-everything.scores, rank), axis=-1)[:, :num_results])


def _only(beams: Beams, chosen: Array) -> Beams:
    return beams._replace(scores=jnp.where(chosen, beams.scores, -jnp.inf))


def _where(rows: Array, these: Beams, others: Beams) -> Beams:
    return jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(rows, tuple(range(1, x.ndim))), x, y), these, others)


def _concatenate(first: Beams, second: Beams) -> Beams:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, second)


def _take(beams: Beams, indices: Array) -> Beams:
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, indices if x.ndim == 2 else indices[:, :, None], axis=1), beams
    )


def _best_with_indices(beams: Beams, count: int) -> tuple[Beams, Array]:
    _, indices = jax.lax.top_k(beams.scores, count)
    return _take(beams, indices), indices


def _best(beams: Beams, count: int) -> Beams:
    return _best_with_indices(beams, count)[0]
