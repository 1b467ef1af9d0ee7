"""A family of checkpoints: how its config.json is read and written, and what its tensors are called."""

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
"""The only value of these fields that can be loaded, in every family. A config.json may also leave them out."""


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint, by the `model_type` in its config.json."""

    model_type: str
    fields: Mapping[str, Field]
    """The fields of config.json that decide what a model is. A field that is not among them, in `fixed` or in
    `aliases`, is not read: the tests say for each such field of transformers why it need not be."""
    rename: Callable[[str], str | None]
    """The name of a tensor as the newest checkpoints have it; None for a tensor that is not a weight."""
    read_config: Callable[[Json, Mapping[str, Tensor]], Any]
    """Our config, from the checked fields of a config.json and the renamed tensors beside it."""
    write_config: Callable[[Any], dict[str, Any]]
    """The config.json of one of our configs, without `model_type` and the special ids."""
    names: Callable[[Any], Names]
    """The tensors of a model with one of our configs."""
    fixed: Json = field(default_factory=dict)
    """The only value of a field that can be loaded, where transformers knows more."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that transformers accepts for a field."""
    special_ids: Json = field(default_factory=dict)
    """The special ids of a config.json that leaves them out."""
    fit: Callable[[Any], Any] = lambda model: model
    """Turns a model into an equivalent one whose weights a checkpoint can hold."""
    save_constants: bool = False
    """Whether a checkpoint also holds the tensors that are computed, such as sinusoidal positions."""

    def read_fields(self, json: Json) -> dict[str, Any]:
        """The checked fields of a config.json; raises on values that these models could not honour."""
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
    """Raise unless each of these fields of our config has the only value that checkpoints of this kind can hold."""
    for name, value in values.items():
        if getattr(config, name) != value:
            raise UserError(
                f"a model with {name}={getattr(config, name)!r} cannot be saved: its kind of checkpoint, {kind}, has "
                f"{name}={value!r}"
            )


def has_head(json: Json, found: Mapping[str, Tensor], *, bare: str, tied: bool) -> bool:
    """Whether a model has an output layer: all but the bare one do, and even that if its embedding is tied."""
    return tied or "lm_head.weight" in found or json["architectures"] != [bare]


def linear(ours: str, theirs: str, *, bias: bool = True) -> dict[str, Weight]:
    """The weight and the bias of a linear map."""
    weights = {f"{ours}.weight": Weight(f"{theirs}.weight")}
    return weights | ({f"{ours}.bias": Weight(f"{theirs}.bias")} if bias else {})


def norm(ours: str, theirs: str, *, bias: bool = True) -> dict[str, Weight]:
    """The scale and the bias of a layer norm; an RMSNorm has no bias."""
    weights = {f"{ours}.scale": Weight(f"{theirs}.weight")}
    return weights | ({f"{ours}.bias": Weight(f"{theirs}.bias")} if bias else {})


def table(ours: str, theirs: str) -> dict[str, Weight]:
    """The table of an embedding."""
    return {f"{ours}.table": Weight(f"{theirs}.weight")}


def blocks(ours: str, theirs: str, layers: Mapping[str, str], *, bias: bool = True) -> dict[str, Weight]:
    """The weights of a stack of blocks. Of the layers of a block, those whose names end in "norm" are norms."""
    weights: dict[str, Weight] = {}
    for layer, name in layers.items():
        weights |= (norm if layer.endswith("norm") else linear)(f"{ours}.{layer}", f"{theirs}.{name}", bias=bias)
    return weights
