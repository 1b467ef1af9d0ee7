"""Sampling: the next token at random by its probability, among all tokens or the likeliest ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from transformer_jax.decoding.step import Step, prefill, row_limits


class Sampled(NamedTuple):
    """What was generated after the prompt. Beyond `lengths` there is nothing but the end id."""

    tokens: Int[Array, "B length"]
    lengths: Int[Array, "B"]
    """Tokens before the end token; all of them when it never came."""


def sample(
    step: Step,
    state: Any,
    prompt: Int[Array, "B P"],
    keys: Key[Array, "B"],
    *,
    length: int,
    limits: Int[Array, "B"] | None = None,
    end_id: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Sampled:
    """Continue each prompt by at most `length` tokens, and by no more than its own limit, until all have ended.

    Args:
        step: the model's step function.
        state: the state of the model before the prompt.
        prompt: what to continue.
        keys: one rng key for each row: what is sampled for a row does not depend on the others.
        length: most tokens to write.
        limits: most tokens to write for each row.
        end_id: the token that ends a text.
        temperature: divides the logits; below 1 the likely become likelier, and 0 takes the likeliest.
        top_k: sample only among this many of the likeliest tokens.
        top_p: sample only among the likeliest tokens that have at least this much probability together, the one that
            crosses it included (Holtzman et al. 2020). With `top_k`, of the probability of those that it keeps.
    """
    if temperature < 0 or not 0 < top_p <= 1 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature={temperature} must not be negative, top_k={top_k} be at least 1, top_p={top_p} be over 0 "
            "and at most 1"
        )
    limits = row_limits(state, prompt, length, limits)

    def unfinished(carry):
        index, _, _, _, lengths = carry
        return jnp.any((index < limits) & (lengths == limits))

    def advance(carry):
        index, last, state, tokens, lengths = carry
        logits, state = step(last, state)
        kept = filtered(logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p)
        sampled = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, index), row))(keys, kept)
        ended = (lengths < limits) | (index >= limits)
        token = jnp.where(ended, end_id, sampled)
        lengths = jnp.where(~ended & (token == end_id), index, lengths)
        return index + 1, token[:, None], state, tokens.at[:, index].set(token), lengths

    last, state = prefill(step, state, prompt)
    tokens = jnp.full((prompt.shape[0], length), end_id, prompt.dtype)
    _, _, _, tokens, lengths = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), last, state, tokens, limits))
    return Sampled(tokens, lengths)


def filtered(
    logits: Float[Array, "B V"], *, temperature: float, top_k: int | None, top_p: float
) -> Float[Array, "B V"]:
    """The logits of the distribution that is sampled from: -inf for tokens that are left out."""
    if temperature == 0:
        return jnp.where(jnp.arange(logits.shape[-1])[None] == jnp.argmax(logits, -1, keepdims=True), 0, -jnp.inf)
    logits = logits / temperature
    vocab_size = logits.shape[-1]
    top_k = min(top_k or vocab_size, vocab_size)
    if top_k == vocab_size and top_p == 1:
        return logits
    # One sort of the values alone, and only as far as `top_k`.
    ranked, _ = jax.lax.top_k(logits, top_k)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # All of them where nothing is asked for: a sum of probabilities may be rounded to 1 before the last.
    count = jnp.sum((before < top_p) | (top_p == 1), axis=-1, keepdims=True)
    least = jnp.take_along_axis(ranked, count - 1, axis=-1)
    # Of tokens that are as likely as the least likely that is kept, the first ones.
    above, equal = logits > least, logits == least
    keep = above | (equal & (jnp.cumsum(equal, axis=-1) <= count - jnp.sum(above, axis=-1, keepdims=True)))
    return jnp.where(keep, logits, -jnp.inf)
