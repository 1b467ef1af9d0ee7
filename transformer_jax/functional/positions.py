"""Where a token stands: sinusoidal, rotary and linear-bias encodings; a learned one is an embedding."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SinusoidVariant = Literal["interleaved", "halved", "tensor2tensor"]


def sinusoidal(
    positions: Int[Array, "*shape"], d_model: int, *, variant: SinusoidVariant = "interleaved", start: int = 0
) -> Float[Array, "*shape {d_model}"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)) (Vaswani et al. 2017, 3.5).

    Args:
        positions: integers, counted from 0.
        d_model: size of the encoding; even.
        variant: `interleaved` is the paper's; `halved` puts all sines before all cosines (Marian, OpenNMT);
            `tensor2tensor` is halved too, and its exponents run over i / (d/2 - 1), so that they include 1 (fairseq).
        start: what the first position counts as (fairseq: its padding id + 1).
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions come in pairs; d_model={d_model} is odd")
    half = d_model // 2
    last = max(half - 1, 1) if variant == "tensor2tensor" else half
    angles = (positions[..., None] + start) * jnp.expand_dims(
        10_000.0 ** (-jnp.arange(half) / last), tuple(range(positions.ndim))
    )
    if variant == "interleaved":
        return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, d_model)
    if variant in ("halved", "tensor2tensor"):
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    raise ValueError(f"variant={variant!r} is unknown; choose 'interleaved', 'halved' or 'tensor2tensor'")


@dataclass(frozen=True)
class RotaryScaling:
    """Rotary frequencies that are lowered, for texts longer than a model was first trained on."""

    kind: Literal["linear", "llama3"]
    """Which frequencies are lowered: all of them (linear, Chen et al. 2023), or only the low ones, whose wavelength is
    long beside original_length (llama3, Llama 3.1)."""
    factor: float
    """Divisor of the frequencies that are lowered."""
    low_frequency_factor: float = 1.0
    """Number of full rotations within original_length below which llama3 lowers a frequency by the whole factor."""
    high_frequency_factor: float = 4.0
    """Number of full rotations within original_length above which llama3 leaves a frequency as it is."""
    original_length: int = 8192
    """Longest text that the model was first trained on, in tokens; only llama3 depends on it."""


def rotary_frequencies(head_size: int, *, base: float, scaling: RotaryScaling | None = None) -> Float[Array, "H/2"]:
    """base^(-2i/H), the angle per position of each pair of features (Su et al. 2021)."""
    half = head_size // 2
    frequencies = base ** (-jnp.arange(half) / half)
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    rotations = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = jnp.clip((rotations - low) / (high - low), 0, 1)
    return (1 - share) * slow + share * frequencies


def rotary(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    *,
    base: float = 10_000.0,
    scaling: RotaryScaling | None = None,
    variant: Literal["interleaved", "halved"] = "halved",
) -> Float[Array, "B T N H"]:
    """Rotate each pair of features by an angle proportional to the position (Su et al. 2021).

    The dot product of a query and a key rotated this way depends on their distance only. Pairs are neighbours in the
    paper (`interleaved`), and (i, i + H/2) in most code (`halved`).
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"rotary positions rotate pairs of features; head size {x.shape[-1]} is odd")
    frequencies = rotary_frequencies(x.shape[-1], base=base, scaling=scaling)
    angles = positions[..., None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    # Positions reach the thousands: the angle is worth nothing in bfloat16.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if variant == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    elif variant == "halved":
        first, second = wide[..., :half], wide[..., half:]
    else:
        raise ValueError(f"variant={variant!r} is unknown; choose 'interleaved' or 'halved'")
    rotated = (first * cos - second * sin, first * sin + second * cos)
    joined = jnp.concatenate(rotated, -1) if variant == "halved" else jnp.stack(rotated, -1).reshape(x.shape)
    return joined.astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[Array, "{num_heads}"]:
    """2^(-8i/N) for i = 1..N when N is a power of two; otherwise filled up from the next power (Press et al. 2022)."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * jnp.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * jnp.arange(1, 2 * (num_heads - power), 2) / power)
    return jnp.concatenate([slopes, between])


def alibi_bias(num_heads: int, num_queries: int, num_keys: int) -> Float[Array, "1 N T S"]:
    """-slope * distance, a bias for the attention scores. The queries are the last of the keys."""
    query = jnp.arange(num_keys - num_queries, num_keys)
    distance = jnp.abs(query[:, None] - jnp.arange(num_keys)[None, :])
    return -alibi_slopes(num_heads)[None, :, None, None] * distance[None, None]


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its segment, counted from 0: documents packed into one row each start anew."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1])[None, :], segments.shape)
    is_start = segments != jnp.roll(segments, 1, axis=1)
    return index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)


def relative_buckets(
    ahead: Int[Array, "*shape"], *, num_buckets: int, max_distance: int, two_sided: bool
) -> Int[Array, "*shape"]:
    """The bucket of a key that stands `ahead` positions after its query (Raffel et al. 2020, section 2.1).

    Half of the buckets are for one distance each, the others grow as its logarithm up to `max_distance`, and the last
    takes all beyond. Two-sided, the first half of all buckets is for keys behind and the second for keys ahead;
    one-sided, keys ahead count as distance 0.
    """
    if two_sided:
        num_buckets //= 2
        first, distance = jnp.where(ahead > 0, num_buckets, 0), jnp.abs(ahead)
    else:
        first, distance = jnp.zeros_like(ahead), jnp.maximum(-ahead, 0)
    exact = num_buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = jnp.minimum(exact + (growth * (num_buckets - exact)).astype(ahead.dtype), num_buckets - 1)
    return first + jnp.where(distance < exact, distance, far)
