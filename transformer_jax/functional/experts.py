"""Mixture of experts: many feed-forward networks, of which each token is computed by the few that a router chooses.

Axis letters besides the usual: E experts, C slots in an expert's buffer. (K is here the choices of a token.)
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.functional.dropout import split
from transformer_jax.functional.feed_forward import Activation, feed_forward
from transformer_jax.functional.precision import matmul_precision
from transformer_jax.functional.softmax import softmax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Balance:
    """How evenly the tokens went to the experts: sums over valid tokens, divided once by the weight.

    They add up over layers, devices and micro-batches, and do not depend on how the batch was divided over these.
    """

    loss: Float[Array, ""]
    """Of each row E * sum_e f_e P_e, once for each of its tokens: f_e is the share of the row's choices that fell on
    expert e, P_e the mean of its probability (Fedus et al. 2021, equation 4). It is 1 where the router is even, and E
    where one expert takes all."""
    z_loss: Float[Array, ""]
    """logsumexp(router logits)^2, which keeps the logits small (Zoph et al. 2022, equation 5)."""
    dropped: Float[Array, ""]
    """The choices that found no room; there are `num_chosen` to each token."""
    weight: Float[Array, ""]
    """The number of tokens."""


def mixture_of_experts(
    x: Float[Array, "B T D"],
    router: Float[Array, "D E"],
    weight_in: Float[Array, "E D F"],
    weight_out: Float[Array, "E F D"],
    bias_in: Float[Array, "E F"] | None = None,
    bias_out: Float[Array, "E D"] | None = None,
    *,
    gate: Float[Array, "E D F"] | None = None,
    activation: Activation = "relu",
    num_chosen: int,
    capacity_factor: float | None,
    valid: Bool[Array, "B T"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, "..."] | None = None,
) -> tuple[Float[Array, "B T D"], Balance]:
    """The sum over a token's chosen experts e of g_e FFN_e(x) (Shazeer et al. 2017), and how even the choices were.

    A token chooses the experts with the largest router logits, of equal ones the first. Their g is the softmax over the
    logits of the chosen (Shazeer et al. 2017, Mixtral). Of a single choice that would be the constant 1, from which the
    router learns nothing: there g is the expert's probability among all (Switch, Fedus et al. 2021).

    Every row is routed by itself, so an example does not depend on what it is batched with. Nor on its padding, which
    takes no room, counts nowhere and gives zero.

    Args:
        x: the tokens; the experts compute in its dtype, the router in float32.
        router: x times this are the logits of the experts.
        weight_in: W1 of each expert; like all that follows up to `activation`, as in `feed_forward`.
        weight_out: W2 of each expert.
        bias_in: b1 of each expert.
        bias_out: b2 of each expert.
        gate: G of each expert.
        activation: f, the same in all.
        num_chosen: how many experts a token goes to.
        capacity_factor: room in an expert, as a multiple of an even share: it takes no more than
            ceil(capacity_factor * num_chosen * tokens / E) of a row's tokens. First choices go before second ones, then
            earlier tokens before later ones (GShard, Lepikhin et al. 2020). Whoever finds no room gets zero from that
            expert: the residual connection carries it on. So a token depends on the whole row, the future included.
            None is room for all, at the cost of computing every token by every expert; it is causal.
        valid: True at tokens, False at padding.
        dropout_rate: probability that a hidden unit is dropped, when there is a `dropout_key`.
        dropout_key: one key, or one for each row of the batch.
    """
    num_experts = router.shape[-1]
    valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
    _check(x, router, weight_in, num_chosen, capacity_factor, valid)
    # Everything below sums over tokens: a NaN in the padding would get through a weight of zero.
    x = jnp.where(valid[:, :, None], x, 0)

    logits = _router_logits(x, router)
    probabilities = softmax(logits, valid[:, :, None])
    chosen = _choices(logits, num_chosen) & valid[:, None, :, None]
    sent = jnp.any(chosen, axis=1)
    shares = softmax(logits, sent) if num_chosen > 1 else jnp.where(sent, probabilities, 0)
    shares = shares.astype(x.dtype)

    keys = jax.tree.map(lambda *keys: jnp.stack(keys), *split(dropout_key, num_experts))
    expert = partial(feed_forward, activation=activation, dropout_rate=dropout_rate)
    weights = (weight_in, weight_out, bias_in, bias_out)
    einsum = partial(jnp.einsum, precision=matmul_precision(x.dtype))
    if capacity_factor is None:
        # As many slots as tokens: each token has its own, and nothing need be moved.
        experts = jax.vmap(expert, in_axes=(None, 0, 0, 0, 0))
        y = einsum("BTE,EBTD->BTD", shares, experts(x, *weights, gate=gate, dropout_key=keys))
        return y, _balance(logits, probabilities, sent, valid, num_chosen, dropped=jnp.zeros((), logits.dtype))

    limits = _limits(capacity_factor, num_chosen, num_experts, x.shape[1])
    slots = _slots(chosen, jnp.array(limits)[jnp.sum(valid, axis=1)])
    dispatch = jax.nn.one_hot(slots, limits[-1], dtype=x.dtype)
    dispatched = einsum("BTEC,BTD->EBCD", dispatch, x)
    returned = jax.vmap(expert)(dispatched, *weights, gate=gate, dropout_key=keys)
    y = einsum("BTEC,EBCD->BTD", dispatch * shares[..., None], returned)
    dropped = jnp.sum(sent & (slots < 0), dtype=logits.dtype)
    return y, _balance(logits, probabilities, sent, valid, num_chosen, dropped)


def _router_logits(x: Float[Array, "B T D"], router: Float[Array, "D E"]) -> Float[Array, "B T E"]:
    # A TPU multiplies float32 as bfloat16 unless it is told not to. A rounded logit is another choice.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("BTD,DE->BTE", x.astype(wide), router.astype(wide), precision="highest")


def _choices(logits: Float[Array, "B T E"], num_chosen: int) -> Bool[Array, "B K T E"]:
    """True at the first choice of each token, at its second, and so on."""
    _, experts = jax.lax.top_k(logits, num_chosen)
    return jax.nn.one_hot(experts.swapaxes(1, 2), logits.shape[-1], dtype=bool)


def _limits(capacity_factor: float, num_chosen: int, num_experts: int, num_tokens: int) -> list[int]:
    """ceil(capacity_factor * num_chosen * tokens / E), for every number of tokens that a row of this length may have.

    The last is the size of the buffer. That is static and a row's own limit is not; from one list, they agree. No limit
    is above the number of tokens: more cannot come.
    """
    share = capacity_factor * num_chosen / num_experts
    # 0.1 * 3 * 10 is a hair more than 3, which is no reason for a fourth slot.
    return [min(math.ceil(round(share * tokens, 6)), tokens) for tokens in range(num_tokens + 1)]


def _slots(chosen: Bool[Array, "B K T E"], limits: Int[Array, "B"]) -> Int[Array, "B T E"]:
    """The slot of each token in each expert's buffer: how many came before it. -1 where it was not sent or is late."""
    num_rows, num_choices, num_tokens, num_experts = chosen.shape
    queue = chosen.reshape(num_rows, num_choices * num_tokens, num_experts)
    before = (jnp.cumsum(queue, axis=1) - queue).reshape(chosen.shape)
    return jnp.max(jnp.where(chosen & (before < limits[:, None, None, None]), before, -1), axis=1)


def _balance(
    logits: Float[Array, "B T E"],
    probabilities: Float[Array, "B T E"],
    sent: Bool[Array, "B T E"],
    valid: Bool[Array, "B T"],
    num_chosen: int,
    dropped: Float[Array, ""],
) -> Balance:
    tokens = jnp.sum(valid, axis=1, dtype=logits.dtype)
    load = jnp.sum(sent, axis=1, dtype=logits.dtype) / num_chosen
    even = jnp.sum(load * jnp.sum(probabilities, axis=1), axis=1) / jnp.maximum(tokens, 1)
    z = jnp.where(valid, jnp.square(jax.nn.logsumexp(logits, axis=-1)), 0)
    return Balance(loss=logits.shape[-1] * jnp.sum(even), z_loss=jnp.sum(z), dropped=dropped, weight=jnp.sum(tokens))


def _check(
    x: Array, router: Array, weight_in: Array, num_chosen: int, capacity_factor: float | None, valid: Array
) -> None:
    num_experts = router.shape[-1]
    if weight_in.shape[0] != num_experts:
        raise ValueError(f"the router has {num_experts} experts but weight_in has {weight_in.shape[0]}")
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"num_chosen must be from 1 to the number of experts, {num_experts}; got {num_chosen}")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor must be above 0 and finite, or None for room for all; got {capacity_factor}")
    if valid.dtype != jnp.bool_:
        raise TypeError(f"valid must be boolean, True at tokens; got {valid.dtype}")
    if valid.shape != x.shape[:2]:
        raise ValueError(f"valid has shape {valid.shape} but x has batch and length {x.shape[:2]}")
