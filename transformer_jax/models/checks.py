"""What a config must keep to, whatever the architecture."""

from typing import Any

from transformer_jax.errors import UserError


def check_sizes(config: Any, *names: str) -> None:
    """Raise unless these, and `unroll`, are all at least 1, or None."""
    for name in (*names, "unroll"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1; got {getattr(config, name)}")


def check_rates(config: Any, *names: str) -> None:
    """Raise unless these are all chances that something may have and still leave the rest."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 0 and below 1; got {getattr(config, name)}")


def check_head(config: Any) -> None:
    """Raise unless the model of a config has an output layer."""
    if not config.lm_head:
        raise UserError("the model has no output layer (lm_head=False); its `hidden` states are what it gives")


def check_heads(d_model: int, num_heads: int) -> None:
    """Raise unless the heads share the model's features evenly."""
    if d_model % num_heads:
        fitting = [n for n in range(1, num_heads + 1) if d_model % n == 0]
        raise UserError(
            f"num_heads={num_heads} does not divide d_model={d_model}; set num_heads to a divisor such as {fitting[-1]}"
        )
