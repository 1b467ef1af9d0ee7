"""Ring attention: sequences sharded along their length, keys and values passed from device to device (Liu et al. 2023).

Each device keeps its queries, and attends to one block of keys and values after another while it sends the block on.
The softmax is computed online: what was added up so far is scaled down whenever a greater score is found (Milakov and
Gimelshein 2018). The backward pass goes round the ring once more: from the keys of a block and the log-sum-exp of each
row, it computes the weights again. The gradients of keys and values travel with them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from transformer_jax.functional.dropout import drop_at, salts
from transformer_jax.functional.masks import Block, Mask, as_mask
from transformer_jax.functional.precision import matmul_precision


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    axis_name: str | tuple[str, ...],
    mask: Mask | Array | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, "..."] | None = None,
    num_queries: int | None = None,
    num_keys: int | None = None,
    dropout_start: UInt32[Array, "#B"] | None = None,
) -> Float[Array, "B T N V"]:
    """The shard of `dot_product_attention` that belongs to this shard of the queries.

    It is called on every shard, inside `jax.shard_map(..., check_vma=False)`. Of a mask and a bias, what has an axis of
    queries is sharded along it like the queries; an axis of keys is whole on every shard. It has a gradient in reverse
    mode only. `layers.sequence_attention` does the same on whole arrays.

    Args:
        query: this device's shard of the queries.
        key: this device's shard of the keys; K heads, each shared by N / K query heads.
        value: this device's shard of the values.
        axis_name: the mesh axis, or axes, that the length is sharded over.
        mask: as in `dot_product_attention`, of all queries and keys.
        bias: added to the scores, after scaling.
        scale: multiplies the scores; 1 / sqrt(H) by default.
        dropout_rate: probability that a weight is dropped, when there is a `dropout_key`.
        dropout_key: one key, or one for each row of the batch. The noise is that of the whole array of weights.
        num_queries: number of queries on all shards, if the last of them are only there to fill the shards.
        num_keys: the same of the keys. What comes after them is not attended to.
        dropout_start: index of each row's first weight among all weights that its key drops, where the rows or the
            heads are sharded too.
    """
    num_shards = jax.lax.axis_size(axis_name)
    ring = _Ring(
        axis_name=axis_name,
        num_shards=num_shards,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_rate=dropout_rate,
        num_queries=query.shape[1] * num_shards if num_queries is None else num_queries,
        num_keys=key.shape[1] * num_shards if num_keys is None else num_keys,
    )
    salt = None
    if dropout_key is not None and dropout_rate != 0:
        salt = salts(dropout_key)
        if dropout_start is None and not dropout_key.ndim:
            row_size = query.shape[2] * ring.num_queries * ring.num_keys
            dropout_start = jnp.arange(query.shape[0], dtype=jnp.uint32) * jnp.uint32(row_size % 2**32)
        if dropout_start is not None:  # the hash adds the first word to the index
            salt = jnp.stack(jnp.broadcast_arrays(salt[:, 0] + dropout_start, salt[:, 1]), axis=1)
    return _attention(ring, query, key, value, bias, None if mask is None else as_mask(mask), salt)


@dataclass(frozen=True)
class _Ring:
    """What is known when it is compiled."""

    axis_name: str | tuple[str, ...]
    num_shards: int
    scale: float
    dropout_rate: float
    num_queries: int
    num_keys: int

    def block(self, step: Array | int, query: Array, key: Array) -> Block:
        """The scores of this device's queries and of the keys that it holds after so many steps."""
        here = jax.lax.axis_index(self.axis_name)
        holder = (here - step) % self.num_shards
        sizes = query.shape[1], key.shape[1]
        return Block(here * sizes[0], sizes[0], holder * sizes[1], sizes[1], self.num_queries, self.num_keys)

    def send(self, arrays: Any) -> Any:
        """The arrays of the device before this one."""
        pairs = [(device, (device + 1) % self.num_shards) for device in range(self.num_shards)]
        return jax.lax.ppermute(arrays, self.axis_name, pairs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, query, key, value, bias, mask, salt) -> Float[Array, "B T N V"]:
    return _forward(ring, query, key, value, bias, mask, salt)[0]


def _forward(ring: _Ring, query, key, value, bias, mask, salt):
    """The attention, and what the backward pass needs."""

    def attend(state, pair, step):
        maximum, total, context = state
        block = ring.block(step, query, pair[0])
        scores = _scores(ring, query, pair[0], bias, mask, block)
        greater = jnp.maximum(maximum, jnp.max(scores, -1))
        shift = jnp.where(greater == -jnp.inf, 0, greater)
        powers, shrink = jnp.exp(scores - shift[..., None]), jnp.exp(maximum - shift)
        kept = _drop(ring, powers, salt, block).astype(value.dtype)
        found = _einsum("BKGTS,BSKV->BKGTV", _grouped(kept, pair[1]), pair[1])
        context = context * shrink[..., None] + found.reshape(context.shape)
        return greater, total * shrink + jnp.sum(powers, -1), context

    def turn(carry, step):
        state, pair = carry
        following = ring.send(pair)  # which needs nothing that is computed here: it is sent in the meantime
        return (attend(state, pair, step), following), None

    num_rows, num_queries, num_heads, _ = query.shape
    rows = (num_rows, num_heads, num_queries)
    wide = _wide(query)
    state = (jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide), jnp.zeros((*rows, value.shape[-1]), wide))
    last = ring.num_shards - 1
    (state, pair), _ = jax.lax.scan(turn, (state, (key, value)), jnp.arange(last))
    maximum, total, context = attend(state, pair, last)
    total = jnp.where(total == 0, 1, total)
    out = jnp.swapaxes(context / total[..., None], 1, 2).astype(value.dtype)
    log_sum = jnp.where(maximum == -jnp.inf, 0, maximum) + jnp.log(total)
    return out, (query, key, value, bias, mask, salt, out, log_sum)


def _backward(ring: _Ring, saved, gradient):
    query, key, value, bias, mask, salt, out, log_sum = saved
    grouped_gradient = _heads_last(gradient, key)
    # The sum over all keys of weight times gradient of the weight, known before any block is seen.
    mean = jnp.swapaxes(jnp.sum(gradient.astype(log_sum.dtype) * out.astype(log_sum.dtype), -1), 1, 2)

    def attend(d_query, d_bias, pair, d_pair, step):
        block = ring.block(step, query, pair[0])
        weights = jnp.exp(_scores(ring, query, pair[0], bias, mask, block) - log_sum[..., None])
        kept = _drop(ring, weights, salt, block).astype(value.dtype)
        d_kept = _einsum("BTKGV,BSKV->BKGTS", grouped_gradient, pair[1]).reshape(weights.shape)
        d_scores = weights * (_drop(ring, d_kept, salt, block) - mean[..., None])
        d_products = _grouped((d_scores * ring.scale).astype(query.dtype), pair[0])
        d_query = d_query + _einsum("BKGTS,BSKH->BTKGH", d_products, pair[0]).reshape(query.shape)
        d_key = d_pair[0] + _einsum("BKGTS,BTKGH->BSKH", d_products, _heads_last(query, key))
        d_value = d_pair[1] + _einsum("BKGTS,BTKGV->BSKV", _grouped(kept, pair[1]), grouped_gradient)
        return d_query, _add(d_bias, d_scores, block), (d_key, d_value)

    def turn(carry, step):
        d_query, d_bias, pair, d_pair = carry
        following = ring.send(pair)
        d_query, d_bias, d_pair = attend(d_query, d_bias, pair, d_pair, step)
        return (d_query, d_bias, following, ring.send(d_pair)), None

    d_query, d_key, d_value = (jnp.zeros(x.shape, _wide(x)) for x in (query, key, value))
    d_bias = None if bias is None else jnp.zeros(bias.shape, _wide(bias))
    last = ring.num_shards - 1
    carry = (d_query, d_bias, (key, value), (d_key, d_value))
    (d_query, d_bias, pair, d_pair), _ = jax.lax.scan(turn, carry, jnp.arange(last))
    d_query, d_bias, d_pair = attend(d_query, d_bias, pair, d_pair, last)
    d_key, d_value = ring.send(d_pair)  # home
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), d_bias, None, None


_attention.defvjp(_forward, _backward)


def _scores(ring: _Ring, query, key, bias, mask, block: Block) -> Float[Array, "B N T S"]:
    """The scores of a block, -inf where attention is not allowed."""
    products = _einsum("BTKGH,BSKH->BKGTS", _heads_last(query, key), key)
    scores = products.reshape(query.shape[0], query.shape[2], block.num_queries, block.num_keys) * ring.scale
    if bias is not None:
        scores = scores + block.take(bias, queries=2, keys=3)
    if mask is not None:
        scores = jnp.where(mask.block(block), scores, -jnp.inf)
    if block.num_keys * ring.num_shards > ring.num_keys:
        there = block.key_start + jnp.arange(block.num_keys) < ring.num_keys
        scores = jnp.where(there[None, None, None, :], scores, -jnp.inf)
    return scores


def _drop(ring: _Ring, weights: Float[Array, "B N T S"], salt, block: Block) -> Float[Array, "B N T S"]:
    """Dropout of a block of weights, by the index of each among the weights of its row, modulo 2^32."""
    if salt is None:
        return weights
    heads, queries, keys = (jax.lax.broadcasted_iota(jnp.uint32, (1, *weights.shape[1:]), axis) for axis in (1, 2, 3))
    queries = queries + jnp.asarray(block.query_start, jnp.uint32)
    keys = keys + jnp.asarray(block.key_start, jnp.uint32)
    index = (heads * jnp.uint32(ring.num_queries) + queries) * jnp.uint32(ring.num_keys) + keys
    return drop_at(weights, salt, index, ring.dropout_rate)


def _add(total: Array | None, part: Float[Array, "B N T S"], block: Block) -> Array | None:
    """The gradient of a bias with that of a block added, summed over the axes that were broadcast."""
    if total is None:
        return None
    starts, sizes = block.slice(total.shape, queries=2, keys=3)
    broadcast = tuple(axis for axis, size in enumerate(sizes) if size != part.shape[axis])
    part = jnp.sum(part, broadcast, keepdims=True) + jax.lax.dynamic_slice(total, starts, sizes)
    return jax.lax.dynamic_update_slice(total, part, starts)


def _heads_last(x: Float[Array, "B T N H"], key: Float[Array, "B S K H"]) -> Float[Array, "B T K G H"]:
    """The query heads in the groups that share a key head."""
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[-1])


def _grouped(x: Float[Array, "B N T S"], key: Float[Array, "B S K H"]) -> Float[Array, "B K G T S"]:
    """The weights of query heads in the groups that share a key head."""
    return x.reshape(x.shape[0], key.shape[2], -1, *x.shape[2:])


def _einsum(equation: str, first: Array, second: Array) -> Array:
    """A product added up in float32 at least."""
    precision = matmul_precision(first.dtype)
    return jnp.einsum(equation, first, second, preferred_element_type=_wide(first), precision=precision)


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
