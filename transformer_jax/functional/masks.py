"""Masks as values: what may attend to what, made into a boolean array only inside attention.

`True` means "may attend", everywhere. Masks combine with `&`. A boolean array is a mask too.
"""

from dataclasses import dataclass, field
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Mask:
    """What each query may attend to. Combine with `&`; `.array(num_queries, num_keys)` is the boolean array."""

    def array(self, num_queries: int, num_keys: int) -> Bool[Array, "#B #N T S"]:
        """The boolean array of this mask, broadcastable to [batch, heads, queries, keys]."""
        raise NotImplementedError

    def __and__(self, other: "Mask | Array") -> "Mask":
        return _All((self, as_mask(other)))

    __rand__ = __and__


def causal(offset: Int[Array, "#B"] | int | None = None) -> Mask:
    """Each query sees itself and what came before: forward in time.

    Query t stands at position `t + offset` of the keys, one offset for all or one per row. By default the queries are
    the last of the keys, which is right for whole sequences and for a few new tokens against all that came before.
    """
    return _Band(None, 0, offset)


def anti_causal(offset: Int[Array, "#B"] | int = 0) -> Mask:
    """Each query sees itself and what comes after: backward in time. By default the queries are the first keys."""
    return _Band(0, None, offset)


def window(before: int, after: int, *, offset: Int[Array, "#B"] | int | None = None) -> Mask:
    """Each query sees `before` keys to its left, itself, and `after` to its right. `offset` as in `causal`."""
    for name, size in (("before", before), ("after", after)):
        if size < 0:
            raise ValueError(f"window: {name} must not be negative; got {size}")
    return _Band(before, after, offset)


def padding(valid: Bool[Array, "B S"]) -> Mask:
    """Only the keys where `valid` is True may be attended to: `padding(tokens != pad_id)`."""
    return _Keys(_boolean("padding", valid))


def segments(queries: Int[Array, "B T"], keys: Int[Array, "B S"] | None = None) -> Mask:
    """Only keys of the query's own segment may be attended to, so that documents packed into one row stay apart."""
    return _Segments(queries, queries if keys is None else keys)


def arbitrary(allowed: Bool[Array, "#B #N #T #S"]) -> Mask:
    """Any boolean array that broadcasts to [batch, heads, queries, keys]."""
    if jnp.ndim(allowed) != 4:
        raise ValueError(f"a mask array needs the axes [batch, heads, queries, keys]; got shape {jnp.shape(allowed)}")
    return _Arbitrary(_boolean("mask", allowed))


def as_mask(mask: Mask | Array) -> Mask:
    """A mask as it is; a boolean array as a mask."""
    return mask if isinstance(mask, Mask) else arbitrary(mask)


_value = jax.tree_util.register_dataclass


@_value
@dataclass(frozen=True)
class _Band(Mask):
    """Position - before <= key <= position + after; None is unbounded."""

    before: int | None = field(metadata={"static": True})
    after: int | None = field(metadata={"static": True})
    offset: Array | int | None = None

    def array(self, num_queries: int, num_keys: int) -> Array:
        offset = num_keys - num_queries if self.offset is None else self.offset
        query = jnp.arange(num_queries)[None, :] + jnp.reshape(jnp.asarray(offset), (-1, 1))
        ahead = jnp.arange(num_keys)[None, None, :] - query[:, :, None]
        allowed = jnp.ones(ahead.shape, bool)
        if self.before is not None:
            allowed &= ahead >= -self.before
        if self.after is not None:
            allowed &= ahead <= self.after
        return allowed[:, None]


@_value
@dataclass(frozen=True)
class _Keys(Mask):
    valid: Array

    def array(self, num_queries: int, num_keys: int) -> Array:
        if self.valid.shape[-1] != num_keys:
            raise ValueError(f"the padding mask covers {self.valid.shape[-1]} keys but there are {num_keys}")
        return self.valid[:, None, None, :]


@_value
@dataclass(frozen=True)
class _Segments(Mask):
    queries: Array
    keys: Array

    def array(self, num_queries: int, num_keys: int) -> Array:
        if (self.queries.shape[-1], self.keys.shape[-1]) != (num_queries, num_keys):
            raise ValueError(
                f"the segment ids cover {self.queries.shape[-1]} queries and {self.keys.shape[-1]} keys "
                f"but there are {num_queries} and {num_keys}"
            )
        return self.queries[:, None, :, None] == self.keys[:, None, None, :]


@_value
@dataclass(frozen=True)
class _Arbitrary(Mask):
    allowed: Array

    def array(self, num_queries: int, num_keys: int) -> Array:
        return self.allowed


@_value
@dataclass(frozen=True)
class _All(Mask):
    parts: tuple[Mask, ...]

    def array(self, num_queries: int, num_keys: int) -> Array:
        return reduce(jnp.logical_and, (part.array(num_queries, num_keys) for part in self.parts))


def _boolean(name: str, array: Array) -> Array:
    array = jnp.asarray(array)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, True where attention is allowed; got {array.dtype}")
    return array
