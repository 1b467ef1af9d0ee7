"""What is to be said of each family of checkpoints: how its config reads, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.functional.feed_forward import Activation
from transformer_jax.interop.fields import NAMES, Field, Json, check_fields, choice, require, with_aliases
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION = choice(ACTIVATIONS)

ANY_FAMILY = {"architectures": Field(NAMES, default=[])}
"""Fields of every config.json."""
FIXED: Json = {
    "add_cross_attention": False,
    "is_decoder": False,
    "per_layer_config": None,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_encoder_decoder": False,
}
"""What every checkpoint must have in these fields, or leave out."""


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint, by the `model_type` in its config.json."""

    model_type: str
    fields: Mapping[str, Field]
    """The fields of config.json that decide what a model is. What is not among them, `fixed` or `aliases` is not read:
    tests say of each such field of transformers why it need not be."""
    rename: Callable[[str], str | None]
    """The name of a tensor as the newest checkpoints have it; None for what is no weight."""
    read_config: Callable[[Json, Mapping[str, Tensor]], Any]
    """Our config for the checked fields of a config.json and the renamed tensors beside it."""
    write_config: Callable[[Any], dict[str, Any]]
    """The config.json of a config of ours, without `model_type` and the special ids."""
    names: Callable[[Any], Names]
    """The tensors of a model with a config of ours."""
    fixed: Json = field(default_factory=dict)
    """The one value that a field may have, where transformers knows more."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that transformers takes for a field."""
    special_ids: Json = field(default_factory=dict)
    """The special ids of a config.json that leaves them out."""
    fit: Callable[[Any], Any] = lambda model: model
    """The same function as a model whose weights a checkpoint can hold."""
    save_constants: bool = False
    """Whether a checkpoint has the tensors that are computed, too."""

    def read_fields(self, json: Json) -> dict[str, Any]:
        """The fields of a config.json, each of its kind; raises on what these models could not honour."""
        json = with_aliases(json, self.aliases)
        require(json, {**FIXED, **self.fixed})
        return check_fields(json, {**ANY_FAMILY, **self.fields})


def our_fields(json: Json, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Fields of our config from those of config.json that mean the same."""
    values = {field.ours: json[theirs] for theirs, field in fields.items() if field.ours}
    if "activation" in values:
        values["activation"] = ACTIVATIONS[values["activation"]]
    return values


def their_fields(config: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Fields of config.json from those of our config that mean the same."""
    values = {theirs: getattr(config, field.ours) for theirs, field in fields.items() if field.ours}
    return values | {
        theirs: write_activation(config.activation) for theirs, field in fields.items() if field.ours == "activation"
    }


def write_activation(activation: Activation) -> str:
    """What config.json calls an activation."""
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


def require_config(config: Any, kind: str, **values: Any) -> None:
    """Raise unless each field of a config of ours has the one value that checkpoints of this kind can have."""
    for name, value in values.items():
        if getattr(config, name) != value:
            raise UserError(
                f"a model with {name}={getattr(config, name)!r} cannot be saved: its kind of checkpoint, {kind}, has "
                f"{name}={value!r}"
            )


def has_head(json: Json, found: Mapping[str, Tensor], *, bare: str, tied: bool) -> bool:
    """Whether a model has an output layer: all have but a bare one, and even that if its embedding serves as one."""
    return tied or "lm_head.weight" in found or json["architectures"] != [bare]


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
