"""Linear maps and table look-ups: the two ways in which a weight meets its input."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.functional.precision import matmul_precision


def linear(
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    num_inputs: int | None = None,
    dtype: jnp.dtype | None = None,
) -> Array:
    """xW + b over as many trailing axes of x as lead the weight; computed in the dtype of x.

    With a weight [D, N, H] and a bias [N, H] it projects [B, T, D] to heads [B, T, N, H]; with [N, H, D] and [D], back.
    Without a bias, all axes of the weight but the last are inputs, unless `num_inputs` says how many. The result has
    the dtype of x, or another `dtype` in which products are added up, such as float32 for logits.
    """
    if num_inputs is None:
        num_inputs = weight.ndim - (1 if bias is None else bias.ndim)
    precision = matmul_precision(x.dtype)
    weight = weight.astype(x.dtype)
    y = jnp.tensordot(x, weight, axes=num_inputs, precision=precision, preferred_element_type=dtype)
    if bias is None:
        return y
    return y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_einsum(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The einsum of two arrays, added up and given in float32 at least; its gradient is computed in their own dtype.

    Of bfloat16 arrays the product is exact to float32, as scores and logits should be. A gradient in float32 would only
    make of two bfloat16 products ones of mixed dtypes, which cost more time and memory.
    """
    precision = matmul_precision(x.dtype)
    return jnp.einsum(
        equation, x, y, precision=precision, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)
    )


@wide_einsum.defjvp
def _wide_einsum_jvp(equation, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    z = wide_einsum(equation, x, y)
    einsum = partial(jnp.einsum, equation, precision=matmul_precision(x.dtype))
    return z, (einsum(dx, y) + einsum(x, dy)).astype(z.dtype)


def embed(table: Float[Array, "V D"], ids: Int[Array, "*shape"]) -> Float[Array, "*shape D"]:
    """The rows of the table that `ids` name. An id outside the table, negative ones too, gives NaN, never a row."""
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
