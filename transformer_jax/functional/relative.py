"""Scores of attention by how far apart query and key are, and whether they are of one segment (Transformer-XL, XLNet).

Each is a term to add to the scores of the contents. The queries are the last T of S keys: those before are a memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.functional.precision import matmul_precision


def relative_distances(num_queries: int, num_keys: int) -> Int[Array, "R"]:
    """S, S - 1, ..., 1 - T: how far a key may stand before its query, or after it, in the order of `relative_shift`.

    R = S + T of them. No pair is S apart: that one makes the shift a matter of reading the same numbers in other rows.
    """
    return jnp.arange(num_keys, -num_queries, -1)


def relative_shift(
    scores: Float[Array, "B N T R"], num_keys: int, query_positions: Int[Array, "B T"] | None = None
) -> Float[Array, "B N T S"]:
    """From a score for each distance to one for each key (Dai et al. 2019, appendix B; here for keys on both sides).

    Args:
        scores: of each query, in the order of `relative_distances`.
        num_keys: S.
        query_positions: counted from 0 after the memory, where the queries are not all tokens in their order.
    """
    num_rows, num_heads, num_queries, num_distances = scores.shape
    num_positions = num_distances - num_keys
    if query_positions is None:
        if num_queries != num_positions:
            raise ValueError(f"{num_queries} queries and {num_keys} keys have other than {num_distances} distances")
        # Query i begins at column T - i, which is R - 1 numbers after the beginning of the query before it.
        flat = scores.reshape(num_rows, num_heads, num_queries * num_distances)[..., num_queries:]
        return flat.reshape(num_rows, num_heads, num_queries, num_distances - 1)[..., :num_keys]

    def of_one_query(scores: Float[Array, "N R"], position: Int[Array, ""]) -> Float[Array, "N S"]:
        return jax.lax.dynamic_slice_in_dim(scores, num_positions - position, num_keys, axis=1)

    of_one_row = jax.vmap(of_one_query, in_axes=(1, 0), out_axes=1)
    return jax.vmap(of_one_row)(scores, query_positions)


def relative_position_scores(
    query: Float[Array, "B T N H"],
    distance_key: Float[Array, "#B R N H"],
    num_keys: int,
    query_positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B N T S"]:
    """q_i r_(i-j): how well each query fits the distance of each key (Dai et al. 2019, section 3.3).

    Args:
        query: with the bias of its own that it has for distances (v of the paper).
        distance_key: one for each of `relative_distances`.
        num_keys: S.
        query_positions: as in `relative_shift`.
    """
    scores = _product("BTNH,BRNH->BNTR", query, distance_key)
    return relative_shift(scores, num_keys, query_positions)


def segment_scores(
    query: Float[Array, "B T N H"], segment_key: Float[Array, "2 N H"], same: Bool[Array, "#B 1 #T #S"]
) -> Float[Array, "B N T S"]:
    """q_i s_ij: one of two keys, the first where query and key are of the same segment (Yang et al. 2019, 2.5)."""
    scores = _product("BTNH,GNH->GBNT", query, segment_key)
    return jnp.where(same, scores[0, ..., None], scores[1, ..., None])


def _product(axes: str, query: Array, key: Array) -> Array:
    """A product of queries and keys, in float32 at least."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum(axes, query, key, preferred_element_type=wide, precision=matmul_precision(query.dtype))
