"""From the tensors of a checkpoint to the weights of a model and back: one table of names serves both ways."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.tensors import Writable
from transformer_jax.interop.untrusted import shown
from transformer_jax.layers import is_parameter

Layout = Literal["torch", "inputs_first", "outputs_first", "flat", "row", "corner", "as_is"]

FLOAT32 = np.dtype(np.float32)
SHOWN = 3  # names in an error
HALF = 2e-3  # the precision of a number near 1 that was saved in 16 bits
FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))


@dataclass(frozen=True)
class Weight:
    """Where a weight of ours is in a checkpoint, and how it lies there."""

    name: str
    """Of the tensor; `{layer}` stands for the number of the layer."""
    layout: Layout | None = None
    """A linear map may be a matrix [outputs, inputs] (`torch`) or [inputs, outputs] (`inputs_first`), or have its axes
    with the outputs first (`outputs_first`); anything may have one axis (`flat`), one or two of size 1 before that
    (`row`, `corner`), or the axes that it has here (`as_is`). None is torch for linear maps, flat for biases, and as_is
    for the rest."""
    part: tuple[int, int] = (0, 1)
    """Which of how many equal parts of the tensor, along its outputs."""


@dataclass(frozen=True)
class Names:
    """All weights of an architecture in a checkpoint."""

    weights: Mapping[str, Weight]
    """By our path, such as `encoder.blocks.feed_forward.input.weight`."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a checkpoint may have besides, and those that they must equal."""
    constants: Mapping[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    """Tensors that it may have besides, though they are computed, and what they must nearly equal."""
    unread: Collection[str] = ()
    """Tensors that it may have besides, which no model reads."""


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """The tensors by their new names, without those whose name is None. What gets one name must be one thing."""
    found: dict[str, tuple[str, Tensor]] = {}
    for old, tensor in tensors.items():
        new = rename(old)
        if new is None:
            continue
        before, other = found.setdefault(new, (old, tensor))
        if not _equal(other, tensor):
            raise UserError(
                f"{tensor.path}: {shown(old)} differs from {shown(before)}, and both are the weight {shown(new)}; "
                "delete the one that is wrong"
            )
    return {new: tensor for new, (_, tensor) in found.items()}


def load_weights(make: Callable[[], nnx.Module], names: Names, tensors: Mapping[str, Tensor], path: Path) -> Any:
    """The model that `make` describes, with the weights of a checkpoint, read one at a time."""
    abstract = jax.eval_shape(make)
    places = [_Place(names.weights[ours], ours, parameter) for ours, parameter in parameters(abstract).items()]
    found = _with_originals(tensors, names.copies)
    _check(found, {name: shape for place in places for name, shape in place.tensors().items()}, names, path)
    weights = [place.parameter.replace(place.read(found)) for place in places]
    return jax.tree.unflatten(jax.tree.structure(abstract, is_leaf=is_parameter), weights)


def weights_to_write(model: nnx.Module, names: Names) -> dict[str, Writable]:
    """The tensors of a checkpoint of this model, each made when its turn comes."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[tuple[int, _Place, int]]] = {}
    for ours, parameter in parameters(model).items():
        place = _Place(names.weights[ours], ours, parameter)
        for layer, (name, shape) in enumerate(place.tensors().items()):
            shapes[name] = shape
            parts.setdefault(name, []).append((place.weight.part[0], place, layer))
    return {name: Writable(shapes[name], FLOAT32, partial(_joined, parts[name])) for name in sorted(parts)}


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Each weight by its path: `encoder.blocks.self_attention.query.weight`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_parameter)
    return {jax.tree_util.keystr(path, simple=True, separator="."): parameter for path, parameter in flat}


class _Place:
    """A weight of ours and the tensors it is in: one, or one for each layer of a stack."""

    def __init__(self, weight: Weight, path: str, parameter: Any):
        self.weight, self.parameter = weight, parameter
        self._stacked = "{layer}" in weight.name
        self._shape = tuple(parameter.shape[self._stacked :])
        self._num_inputs = parameter.num_inputs or 0
        otherwise = "torch" if self._num_inputs else "flat" if path.endswith("bias") else "as_is"
        self._layout = weight.layout or otherwise
        inputs, outputs = self._shape[: self._num_inputs], self._shape[self._num_inputs :]
        self._their_shape = {
            "torch": (prod(outputs), prod(inputs)),
            "inputs_first": (prod(inputs), prod(outputs)),
            "outputs_first": outputs + inputs,
            "flat": (prod(self._shape),),
            "row": (1, prod(self._shape)),
            "corner": (1, 1, prod(self._shape)),
            "as_is": self._shape,
        }[self._layout]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The names of the tensors and their shapes, in the order of the layers."""
        whole = list(self._their_shape)
        whole[self.axis] *= self.weight.part[1]
        count = self.parameter.shape[0] if self._stacked else 1
        return {self.weight.name.format(layer=layer): tuple(whole) for layer in range(count)}

    @property
    def axis(self) -> int:
        """The axis of the outputs in a tensor."""
        return -1 if self._layout == "inputs_first" else 0

    def read(self, tensors: Mapping[str, Tensor]) -> jax.Array:
        """The weight, in float32."""
        layers = np.empty((len(self.tensors()), *self._shape), np.float32)
        for layer, name in enumerate(self.tensors()):
            index, count = self.weight.part
            with np.errstate(all="ignore"):  # what is too large for float32 is infinite, and found to be
                layers[layer] = self._ours(np.split(tensors[name].read(), count, self.axis)[index])
            _check_finite(layers[layer], name, tensors[name])
        return jax.device_put(layers if self._stacked else layers[0])

    def write(self, layer: int) -> np.ndarray:
        """The part of a layer's tensor that this weight is."""
        weight = self.parameter[...]
        if self._stacked:  # an index that is data: compiled once for all layers
            weight = jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False)
        weight = np.asarray(weight, np.float32)
        if self._layout == "torch":
            return weight.reshape(self._their_shape[::-1]).T
        if self._layout == "outputs_first":
            return weight.transpose(*range(self._num_inputs, weight.ndim), *range(self._num_inputs))
        return weight.reshape(self._their_shape)

    def _ours(self, tensor: np.ndarray) -> np.ndarray:
        if self._layout == "outputs_first":
            num_outputs = tensor.ndim - self._num_inputs
            return tensor.transpose(*range(num_outputs, tensor.ndim), *range(num_outputs))
        return (tensor.T if self._layout == "torch" else tensor).reshape(self._shape)


def _joined(parts: list[tuple[int, _Place, int]]) -> np.ndarray:
    arrays = [place.write(layer) for _, place, layer in sorted(parts, key=lambda part: part[0])]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, parts[0][1].axis)


def _with_originals(tensors: Mapping[str, Tensor], copies: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors, with the original of each copy: which of the two a checkpoint has is chance."""
    originals = {original: tensors[copy] for copy, original in copies.items() if copy in tensors}
    return originals | dict(tensors)


def _check(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], names: Names, path: Path) -> None:
    """Raise on a tensor that is missing, left over, misshapen or of integers, and a copy or constant that differs."""
    _raise_on([name for name in wanted if name not in found], f"{path} lacks", "which its config asks for")
    extra = [name for name in found if name not in {*wanted, *names.copies, *names.constants, *names.unread}]
    _raise_on(extra, f"{path} has", "for which its config has no place")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise UserError(f"{path}: {name} has shape {found[name].shape}, but its config asks for {shape}")
    for name in (*wanted, *names.copies):
        if name in found and found[name].dtype not in FLOATS:
            raise UserError(
                f"{found[name].path}: {name} has dtype {found[name].dtype}, but a weight has one of "
                f"{', '.join(map(str, FLOATS))}; convert the checkpoint to one of these"
            )
    for copy, original in names.copies.items():
        if copy in found and not _equal(found[copy], found[original]):
            raise UserError(
                f"{found[copy].path}: {copy} differs from {original}, but its config says that they are one"
            )
    for name, constant in names.constants.items():
        if name in found:
            value, expected = found[name].read().astype(np.float32), constant()
            if value.shape != expected.shape or not np.allclose(value, expected, atol=HALF):
                raise UserError(f"{path}: {name} is not what a model of its config computes there")


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values. Those that are not numbers are found elsewhere."""
    return first == second or (
        first.shape == second.shape and np.array_equal(first.read(), second.read(), equal_nan=True)
    )


def _check_finite(values: np.ndarray, name: str, tensor: Tensor) -> None:
    # The least and the largest are NaN if anything is, and need no array as large as the weight.
    if not np.isfinite([values.min(initial=0), values.max(initial=0)]).all():
        count = int(np.sum(~np.isfinite(values)))
        raise UserError(
            f"{tensor.path}: {name} has {count} values that are NaN, infinite or too large for float32; "
            "get it again, or save the model before it diverged"
        )


def _raise_on(names: Iterable[str], what: str, why: str) -> None:
    names = sorted(names)
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(f"{what} {', '.join(map(shown, names[:SHOWN]))}{more}, {why}")
