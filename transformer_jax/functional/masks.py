"""Masks as values: what may attend to what, made into a boolean array only inside attention.

`True` means "may attend", everywhere. Masks combine with `&`. A boolean array is a mask too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Axis = Literal["batch", "heads", "queries", "keys"]
Change = Callable[[Any, tuple[Axis, ...]], Any]
"""A function of an array and of the names of its axes."""


class Block(NamedTuple):
    """A rectangle of the scores: some of the queries against some of the keys. The starts may be traced."""

    query_start: Int[Array, ""] | int
    num_queries: int
    key_start: Int[Array, ""] | int
    num_keys: int
    total_queries: int
    total_keys: int

    def slice(
        self, shape: tuple[int, ...], *, queries: int | None = None, keys: int | None = None
    ) -> tuple[list[Array], list[int]]:
        """Where the block is in an array with these axes of queries and keys: its starts and its sizes.

        An axis of one entry is broadcast. The queries may be those of the block alone; the keys are of all blocks.
        """
        starts: list[Array | int] = [0] * len(shape)
        sizes = list(shape)
        if queries is not None and shape[queries] != self.num_queries:
            span = _span("queries", shape[queries], self.query_start, self.num_queries, self.total_queries)
            starts[queries], sizes[queries] = span
        if keys is not None:
            starts[keys], sizes[keys] = _span("keys", shape[keys], self.key_start, self.num_keys, self.total_keys)
        return [jnp.asarray(start, jnp.int32) for start in starts], sizes  # which must be of one type

    def take(self, array: Array, *, queries: int | None = None, keys: int | None = None) -> Array:
        """The part of an array that belongs to the block; see `slice`."""
        starts, sizes = self.slice(array.shape, queries=queries, keys=keys)
        return array if tuple(sizes) == array.shape else jax.lax.dynamic_slice(array, starts, sizes)


def _span(name: str, size: int, start: Array | int, count: int, total: int) -> tuple[Array | int, int]:
    """Where a block begins along an axis of this size, and how long it is there."""
    if size == 1 or count >= total:
        return 0, size
    whole_blocks = -(-total // count) * count
    if size < whole_blocks:  # a slice past the end would be moved back, over what belongs to another block
        raise ValueError(
            f"a mask or bias covers {size} {name}, but blocks of {count} need {whole_blocks}; give each shard all "
            f"{name}, padded to a multiple of the block"
        )
    return start, count


class Mask:
    """What each query may attend to. Combine with `&`; `.array(num_queries, num_keys)` is the boolean array."""

    def array(self, num_queries: int, num_keys: int) -> Bool[Array, "#B #N T S"]:
        """The boolean array of this mask, broadcastable to [batch, heads, queries, keys]."""
        return self.block(Block(0, num_queries, 0, num_keys, num_queries, num_keys))

    def block(self, block: Block) -> Bool[Array, "#B #N #T #S"]:
        """The boolean array of one block of the scores."""
        raise NotImplementedError

    def map(self, function: Change) -> Any:
        """This mask with `function(array, axes)` in place of each of its arrays: to pad them, or to shard them."""
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

    def block(self, block: Block) -> Array:
        offset = block.total_keys - block.total_queries if self.offset is None else self.offset
        query = block.query_start + jnp.arange(block.num_queries)[None, :] + jnp.reshape(jnp.asarray(offset), (-1, 1))
        ahead = block.key_start + jnp.arange(block.num_keys)[None, None, :] - query[:, :, None]
        allowed = jnp.ones(ahead.shape, bool)
        if self.before is not None:
            allowed &= ahead >= -self.before
        if self.after is not None:
            allowed &= ahead <= self.after
        return allowed[:, None]

    def map(self, function: Change) -> Any:
        if self.offset is None:
            return self
        return _Band(self.before, self.after, function(self.offset, ("batch",) if jnp.ndim(self.offset) else ()))


@_value
@dataclass(frozen=True)
class _Keys(Mask):
    valid: Array

    def array(self, num_queries: int, num_keys: int) -> Array:
        if self.valid.shape[-1] != num_keys:
            raise ValueError(f"the padding mask covers {self.valid.shape[-1]} keys but there are {num_keys}")
        return super().array(num_queries, num_keys)

    def block(self, block: Block) -> Array:
        return block.take(self.valid, keys=1)[:, None, None, :]

    def map(self, function: Change) -> Any:
        return _Keys(function(self.valid, ("batch", "keys")))


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
        return super().array(num_queries, num_keys)

    def block(self, block: Block) -> Array:
        queries, keys = block.take(self.queries, queries=1), block.take(self.keys, keys=1)
        return queries[:, None, :, None] == keys[:, None, None, :]

    def map(self, function: Change) -> Any:
        return _Segments(function(self.queries, ("batch", "queries")), function(self.keys, ("batch", "keys")))


@_value
@dataclass(frozen=True)
class _Arbitrary(Mask):
    allowed: Array

    def block(self, block: Block) -> Array:
        return block.take(self.allowed, queries=2, keys=3)

    def map(self, function: Change) -> Any:
        return _Arbitrary(function(self.allowed, ("batch", "heads", "queries", "keys")))


@_value
@dataclass(frozen=True)
class _All(Mask):
    parts: tuple[Mask, ...]

    def array(self, num_queries: int, num_keys: int) -> Array:
        return reduce(jnp.logical_and, (part.array(num_queries, num_keys) for part in self.parts))

    def block(self, block: Block) -> Array:
        return reduce(jnp.logical_and, (part.block(block) for part in self.parts))

    def map(self, function: Change) -> Any:
        return _All(tuple(part.map(function) for part in self.parts))


def _boolean(name: str, array: Array) -> Array:
    array = jnp.asarray(array)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{name} must be boolean, True where attention is allowed; got {array.dtype}")
    return array
