"""What is to be said of each family of checkpoints: how its config reads, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight

Json = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint, by the `model_type` in its config.json."""

    model_type: str
    defaults: Json
    """What a field is that config.json leaves out."""
    rename: Callable[[str], str | None]
    """The name of a tensor as the newest checkpoints have it; None for what is no weight."""
    read_config: Callable[[Json, Mapping[str, Tensor]], Any]
    """Our config for a config.json and the renamed tensors beside it."""
    write_config: Callable[[Any], dict[str, Any]]
    """The config.json of a config of ours, without `model_type`."""
    names: Callable[[Any], Names]
    """The tensors of a model with a config of ours."""


def read_fields(json: Json, fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of our config from those of config.json that mean the same."""
    values = {ours: json[theirs] for ours, theirs in fields.items()}
    if "activation" in values:
        values["activation"] = read_activation(json, fields["activation"])
    return values


def write_fields(config: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of config.json from those of our config that mean the same."""
    values = {theirs: getattr(config, ours) for ours, theirs in fields.items()}
    if "activation" in fields:
        values[fields["activation"]] = write_activation(config.activation)
    return values


def read_activation(json: Json, field: str) -> Activation:
    """The activation that a field of config.json names."""
    if json[field] not in ACTIVATIONS:
        raise UserError(f"config.json: {field}={json[field]!r} is not known; it can be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[json[field]]


def write_activation(activation: Activation) -> str:
    """What config.json calls an activation."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


def require(json: Json, **values: Any) -> None:
    """Raise unless each field that is there has the one value that these models can have."""
    for field, value in values.items():
        if json.get(field, value) != value:
            raise UserError(f"config.json: {field}={json[field]!r} cannot be loaded; it must be {value!r}")


def require_config(config: Any, kind: str, **values: Any) -> None:
    """Raise unless each field of a config of ours has the one value that checkpoints of this kind can have."""
    for field, value in values.items():
        if getattr(config, field) != value:
            raise UserError(
                f"a model with {field}={getattr(config, field)!r} cannot be saved: its kind of checkpoint, {kind}, has "
                f"{field}={value!r}"
            )


def has_head(json: Json, found: Mapping[str, Tensor], *, bare: str, tied: bool) -> bool:
    """Whether a model has an output layer: all have but a bare one, and even that if its embedding serves as one."""
    return tied or "lm_head.weight" in found or json.get("architectures") != [bare]


def linear(ours: str, theirs: str, *, bias: bool = True) -> dict[str, Weight]:
    """A linear map: its weight and its bias."""
    weights = {f"{ours}.weight": Weight(f"{theirs}.weight")}
    return weights | ({f"{ours}.bias": Weight(f"{theirs}.bias")} if bias else {})


def norm(ours: str, theirs: str, *, bias: bool = True) -> dict[str, Weight]:
    """A layer norm, or one of root mean squares, which has no bias."""
    weights = {f"{ours}.scale": Weight(f"{theirs}.weight")}
    return weights | ({f"{ours}.bias": Weight(f"{theirs}.bias")} if bias else {})


def table(ours: str, theirs: str) -> dict[str, Weight]:
    """An embedding."""
    return {f"{ours}.table": Weight(f"{theirs}.weight")}


def blocks(ours: str, theirs: str, parts: Mapping[str, str], *, bias: bool = True) -> dict[str, Weight]:
    """The blocks of a stack: their linear maps and their norms, which are called so."""
    weights: dict[str, Weight] = {}
    for part, name in parts.items():
        weights |= (norm if part.endswith("norm") else linear)(f"{ours}.{part}", f"{theirs}.{name}", bias=bias)
    return weights
