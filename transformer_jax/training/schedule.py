"""Learning rates as functions of the step. Steps count from 0: the first update is made with `rate(0)`."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def inverse_square_root(d_model: int, warmup_steps: int, scale: float = 1.0) -> Schedule:
    """Scale * d^-0.5 * min(n^-0.5, n * warmup^-1.5) at the n-th update, n = 1, 2, ... (Vaswani et al. 2017, 5.3)."""

    def rate(step: Array) -> Array:
        n = jnp.asarray(step, jnp.float32) + 1
        return scale * d_model**-0.5 * jnp.minimum(n**-0.5, n * warmup_steps**-1.5)

    return rate


def cosine(peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Linear warm-up to `peak` at update `warmup_steps`, then half a cosine down to a fraction of it."""

    def decay(progress: Array) -> Array:
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))

    return _warmed_up(peak, warmup_steps, total_steps, decay)


def linear(peak: float, warmup_steps: int, total_steps: int, final_fraction: float = 0.0) -> Schedule:
    """Linear warm-up to `peak` at update `warmup_steps`, then a straight line down to a fraction of it."""

    def decay(progress: Array) -> Array:
        return 1 - (1 - final_fraction) * progress

    return _warmed_up(peak, warmup_steps, total_steps, decay)


def _warmed_up(peak: float, warmup_steps: int, total_steps: int, decay: Callable[[Array], Array]) -> Schedule:
    def rate(step: Array) -> Array:
        n = jnp.asarray(step, jnp.float32) + 1
        progress = jnp.clip((n - warmup_steps) / max(total_steps - warmup_steps, 1), 0, 1)
        return peak * jnp.minimum(1, n / max(warmup_steps, 1)) * decay(progress)

    return rate
