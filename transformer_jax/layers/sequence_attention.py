"""Sequence parallelism: attention over sequences that are sharded along their length."""

from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key, UInt32

from transformer_jax.errors import UserError
from transformer_jax.functional.masks import Axis, Mask, as_mask
from transformer_jax.functional.ring import ring_attention
from transformer_jax.parallel.axes import automatic_axes, partition


def shards_sequence() -> bool:
    """Whether the current mesh (`jax.set_mesh`) shards sequences along their length.

    It does not inside `shard_map` and `pmap`, where each device computes for itself.
    """
    sizes = automatic_axes()
    return prod(sizes[axis] for axis in _mesh_axes(("length",), sizes)[0]) > 1


def sequence_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    mask: Mask | Array | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, "..."] | None = None,
) -> Float[Array, "B T N V"]:
    """`functional.dot_product_attention` over the current mesh, with `ring_attention` along the length.

    Lengths need not divide over their mesh axes. Rows and heads that do not are replicated over theirs; key heads that
    do not are repeated until they do. No device ever has all keys, nor more than a block of the scores. It has a
    gradient in reverse mode only.

    Args:
        query: what is looked for.
        key: what can be found; K heads, each shared by N / K query heads.
        value: what is read where it is found.
        mask: a mask value, or a boolean array that is True where attention is allowed.
        bias: added to the scores, after scaling.
        scale: multiplies the scores; 1 / sqrt(H) by default.
        dropout_rate: probability that a weight is dropped, when there is a `dropout_key`.
        dropout_key: one key, or one for each row of the batch.

    Raises:
        UserError: If there is no mesh with an axis for the length.
        ValueError: If a mask or the bias has other sizes than the queries and keys.
    """
    layout = _Layout.of(query, key)
    num_queries, num_keys, num_key_heads = query.shape[1], key.shape[1], key.shape[2]
    repeats = lcm(num_key_heads, layout.num_shards("heads")) // num_key_heads
    key, value = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (key, value))
    query, key, value = (_pad(x, 1, layout.num_shards("queries")) for x in (query, key, value))
    mask = None if mask is None else as_mask(mask).map(layout.pad)
    bias = None if bias is None else layout.pad(bias, _SCORES)

    def shard(query, key, value, mask, bias, dropout_key):
        return ring_attention(
            query,
            key,
            value,
            axis_name=layout.mesh_axes["queries"],
            mask=mask,
            bias=bias,
            scale=scale,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            num_queries=num_queries,
            num_keys=num_keys,
            dropout_start=None if dropout_key is None else layout.dropout_start(dropout_key),
        )

    sharded = PartitionSpec(*(layout.mesh_axes[name] for name in ("batch", "queries", "heads")))
    whole = PartitionSpec()
    specs = (
        *(sharded, sharded, sharded),
        whole if mask is None else mask.map(layout.spec),
        whole if bias is None else layout.spec(bias, _SCORES),
        whole if dropout_key is None else layout.spec(dropout_key, _SCORES[: dropout_key.ndim]),
    )
    attention = jax.shard_map(shard, in_specs=specs, out_specs=sharded, axis_names=set(layout.sizes), check_vma=False)
    return attention(query, key, value, mask, bias, dropout_key)[:, :num_queries]


_SCORES: tuple[Axis, ...] = ("batch", "heads", "queries", "keys")


@dataclass(frozen=True)
class _Layout:
    """How the scores of one attention lie on the mesh."""

    sizes: dict[str, int]
    """Of the axes of the mesh."""
    totals: dict[Axis, int]
    """Of the axes of the scores, before they are padded."""
    mesh_axes: dict[Axis, tuple[str, ...]]
    """That each axis of the scores is sharded over. The keys of masks and biases are not: they are small."""

    @classmethod
    def of(cls, query: Array, key: Array) -> "_Layout":
        sizes = automatic_axes()
        rows, length, heads = _mesh_axes(("batch", "length", "heads"), sizes)
        if not length:
            raise UserError(
                f"sequence_attention needs a mesh axis for the length; the mesh has {', '.join(sizes) or 'no axes'}; "
                "set a mesh with an axis 'sequence', and rules.length, or use dot_product_attention"
            )
        totals = dict(zip(_SCORES, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]), strict=True))

        def dividing(axes: tuple[str, ...], total: int) -> tuple[str, ...]:
            return () if total % prod(sizes[axis] for axis in axes) else axes

        rows, heads = dividing(rows, totals["batch"]), dividing(heads, totals["heads"])
        return cls(sizes, totals, {"batch": rows, "heads": heads, "queries": length, "keys": ()})

    def num_shards(self, name: Axis) -> int:
        return prod(self.sizes[axis] for axis in self.mesh_axes[name])

    def pad(self, x: Any, axes: tuple[Axis, ...]) -> Array:
        """An array of a mask or bias, padded as queries and keys are. An axis of one entry is broadcast as it is."""
        x = jnp.asarray(x)
        for axis, name in enumerate(axes):
            if x.shape[axis] == 1:
                continue
            if x.shape[axis] != self.totals[name]:
                raise ValueError(f"a mask or bias covers {x.shape[axis]} {name} but there are {self.totals[name]}")
            if name in ("queries", "keys"):
                x = _pad(x, axis, self.num_shards("queries"))
        return x

    def spec(self, x: Array, axes: tuple[Axis, ...]) -> PartitionSpec:
        """The partition of an array with these axes of the scores."""
        named = zip(axes, x.shape, strict=True)
        return PartitionSpec(*(None if size == 1 else self.mesh_axes[name] for name, size in named))

    def dropout_start(self, key: Key[Array, "*B"]) -> UInt32[Array, "#B"]:
        """Index of each row's first weight on this shard among all weights that its key drops, modulo 2^32."""
        rows = jnp.zeros(1, jnp.uint32)
        if not key.ndim:  # which counts on from each row to the next
            count = self.totals["batch"] // self.num_shards("batch")
            rows = jnp.arange(count, dtype=jnp.uint32) + self._shard("batch") * jnp.uint32(count)
        first_head = self._shard("heads") * jnp.uint32(self.totals["heads"] // self.num_shards("heads"))
        head_size = jnp.uint32(self.totals["queries"] * self.totals["keys"] % 2**32)
        return (rows * jnp.uint32(self.totals["heads"]) + first_head) * head_size

    def _shard(self, name: Axis) -> UInt32[Array, ""]:
        """Which shard of an axis is on this device."""
        axes = self.mesh_axes[name]
        return jnp.asarray(jax.lax.axis_index(axes) if axes else 0, jnp.uint32)


def _mesh_axes(names: tuple[str, ...], sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """The mesh axes of each logical axis, which a partition has as one name where there is one."""
    return [(axes,) if isinstance(axes, str) else axes or () for axes in partition(names, tuple(sizes))]


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """x with zeros after the last entry of an axis, up to a multiple."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
