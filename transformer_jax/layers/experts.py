"""A mixture of experts with its parameters: feed-forward networks, of which each token uses a few."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from transformer_jax.errors import UserError
from transformer_jax.functional.experts import Balance, mixture_of_experts
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.parameter import Initializer, LinearInitializer, glorot_uniform, parameter, zeros


@dataclass(frozen=True)
class ExpertsConfig:
    """How many experts there are, how many each token uses, and what keeps them evenly used."""

    num_experts: int
    """Number of experts."""
    num_chosen: int = 2
    """Number of experts that each token uses."""
    capacity_factor: float | None = None
    """Most tokens that an expert of an encoder takes, as a multiple of an even share; None takes all, and computes
    every token by every expert. With a limit, whether a token finds room depends on those after it, so that a decoder
    has none."""
    balance_weight: float = 0.01
    """Weight of the load balancing loss, which is large where experts are used unevenly (Fedus et al. 2021)."""
    logit_weight: float = 0.001
    """Weight of the z-loss, which is large where the logits of the router are (Zoph et al. 2022)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise UserError(f"num_chosen={self.num_chosen} must be from 1 to num_experts={self.num_experts}")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UserError(f"capacity_factor={self.capacity_factor} must be above 0; None has room for every token")

    def for_decoder(self) -> "ExpertsConfig":
        """The same experts with room for every token, so that none depends on those after it."""
        return replace(self, capacity_factor=None)


class Experts(nnx.Module):
    """Several feed-forward networks and a router that chooses among them for each token (Shazeer et al. 2017)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        config: ExpertsConfig,
        activation: Activation,
        dropout_rate: float,
        *,
        gated: bool = False,
        bias: bool = True,
        initializer: LinearInitializer = glorot_uniform,
        output_initializer: LinearInitializer | None = None,
        rngs: nnx.Rngs,
    ):
        experts, embed, ff = {"experts": config.num_experts}, {"embed": d_model}, {"ff": d_ff}
        inward, outward = _each(initializer(1)), _each((output_initializer or initializer)(1))
        self.router = parameter(rngs, embed | experts, initializer(1), decay=True)
        self.weight_in = parameter(rngs, experts | embed | ff, inward, decay=True)
        self.gate = parameter(rngs, experts | embed | ff, inward, decay=True) if gated else None
        self.weight_out = parameter(rngs, experts | ff | embed, outward, decay=True)
        self.bias_in = parameter(rngs, experts | ff, zeros, decay=False) if bias else None
        self.bias_out = parameter(rngs, experts | embed, zeros, decay=False) if bias else None
        self.config = config
        self.activation = activation
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        valid: Bool[Array, "B T"] | None = None,
        dropout_key: Key[Array, "#B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Balance]:
        """What the chosen experts make of x, and how evenly they were used. What is not valid uses none."""
        return mixture_of_experts(
            x,
            self.router[...],
            self.weight_in[...],
            self.weight_out[...],
            None if self.bias_in is None else self.bias_in[...],
            None if self.bias_out is None else self.bias_out[...],
            gate=None if self.gate is None else self.gate[...],
            activation=self.activation,
            num_chosen=self.config.num_chosen,
            capacity_factor=self.config.capacity_factor,
            valid=valid,
            dropout_rate=self.dropout_rate,
            dropout_key=dropout_key,
        )


def feed_forward_or_experts(
    d_model: int,
    d_ff: int,
    experts: ExpertsConfig | None,
    activation: Activation,
    dropout_rate: float,
    *,
    gated: bool = False,
    bias: bool = True,
    initializer: LinearInitializer = glorot_uniform,
    output_initializer: LinearInitializer | None = None,
    rngs: nnx.Rngs,
) -> FeedForward | Experts:
    """What follows the attention of a block: one network, or several where `experts` says how many."""
    if experts is None:
        return FeedForward(
            *(d_model, d_ff, activation, dropout_rate),
            gated=gated,
            bias=bias,
            initializer=initializer,
            output_initializer=output_initializer,
            rngs=rngs,
        )
    return Experts(
        *(d_model, d_ff, experts, activation, dropout_rate),
        gated=gated,
        bias=bias,
        initializer=initializer,
        output_initializer=output_initializer,
        rngs=rngs,
    )


def _each(initializer: Initializer) -> Initializer:
    """Each expert initialized by itself, so that fans are those of one."""

    def initialize(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jax.vmap(lambda key: initializer(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return initialize


def balance_loss(balance: Balance | None, config: ExpertsConfig | None) -> Float[Array, ""]:
    """What unevenly used experts and large logits of the routers of all layers add to the sum of the losses."""
    if balance is None or config is None:
        return jnp.float32(0)
    return jnp.sum(config.balance_weight * balance.loss + config.logit_weight * balance.z_loss)
