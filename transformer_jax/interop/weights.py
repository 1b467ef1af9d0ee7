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
from jax.sharding import Mesh, Sharding

from transformer_jax.errors import UserError
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.tensors import Writable
from transformer_jax.interop.untrusted import shown
from transformer_jax.layers import is_parameter, named_parameters
from transformer_jax.parallel import parameter_sharding

TensorLayout = Literal["torch", "inputs_first", "outputs_first", "flat", "row", "corner", "as_is"]

FLOAT32 = np.dtype(np.float32)
SHOWN = 3  # names in an error
BLOCK = 1 << 16  # values checked at once
HALF = 2e-3  # the precision of a number near 1 that was saved in 16 bits
FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))


@dataclass(frozen=True)
class Weight:
    """The tensor of a checkpoint that holds one of our weights, and its layout there."""

    name: str
    """The name of the tensor; `{layer}` stands for the index of the layer."""
    layout: TensorLayout | None = None
    """A linear map may be a matrix [outputs, inputs] (`torch`) or [inputs, outputs] (`inputs_first`), or keep all its
    axes with the outputs first (`outputs_first`). Any weight may have one axis (`flat`), one or two axes of size 1
    before it (`row`, `corner`), or the axes that it has here (`as_is`). None is torch for linear maps, flat for biases,
    and as_is for the rest."""
    part: tuple[int, int] = (0, 1)
    """(index, count): the tensor is split along its outputs into `count` equal parts, of which this weight is one."""


@dataclass(frozen=True)
class Names:
    """The tensors of an architecture's checkpoint."""

    weights: Mapping[str, Weight]
    """The tensor of each weight, by the weight's path: `encoder.blocks.feed_forward.input.weight`."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a checkpoint may also have, such as tied ones, and the tensors that they must equal."""
    constants: Mapping[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    """Tensors that it may also have though models compute them, and the values that they must nearly equal."""
    unread: Collection[str] = ()
    """Tensors that it may also have, which no model reads."""


def renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """The tensors by their new names, without those whose name is None. Tensors with the same name must be equal."""
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


def load_weights(
    make: Callable[[], nnx.Module],
    names: Names,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: np.dtype = FLOAT32,
    sharding: Sharding | Mesh | None = None,
) -> Any:
    """The model that `make` describes, with the weights of a checkpoint.

    One weight at a time is read, cast and put on the devices: the host never holds more than one weight (all layers of
    it, where it is of a stack), and no device holds more of it than its own shard, in `dtype`.

    Args:
        make: Makes the model. It is only traced, so that nothing is initialized.
        names: Where each weight is in the checkpoint.
        tensors: The tensors of the checkpoint.
        path: The checkpoint, for errors.
        dtype: What the weights are cast to.
        sharding: Of every weight; or a mesh, on which each weight is laid out by its logical axes; None is the default
            device.
    """
    abstract = jax.eval_shape(make)
    bindings = [
        _Binding(names.weights[ours], ours, parameter) for ours, parameter in named_parameters(abstract).items()
    ]
    shardings = [_sharding(binding, sharding) for binding in bindings]
    found = _with_originals(tensors, names.copies)
    _check(found, {name: shape for binding in bindings for name, shape in binding.tensors().items()}, names, path)
    weights = [
        binding.parameter.replace(_put(binding.read(found, dtype), one))
        for binding, one in zip(bindings, shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract, is_leaf=is_parameter), weights)


def weights_to_write(model: nnx.Module, names: Names) -> dict[str, Writable]:
    """The tensors of a checkpoint of this model, each made when it is written."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[tuple[int, _Binding, int]]] = {}
    for ours, parameter in named_parameters(model).items():
        binding = _Binding(names.weights[ours], ours, parameter)
        for layer, (name, shape) in enumerate(binding.tensors().items()):
            shapes[name] = shape
            parts.setdefault(name, []).append((binding.weight.part[0], binding, layer))
    return {name: Writable(shapes[name], FLOAT32, partial(_joined, parts[name])) for name in sorted(parts)}


class _Binding:
    """One of our weights and the tensors that hold it: one, or one for each layer of a stack."""

    def __init__(self, weight: Weight, path: str, parameter: Any):
        self.weight, self.path, self.parameter = weight, path, parameter
        self._stacked = "{layer}" in weight.name
        self._shape = tuple(parameter.shape[self._stacked :])
        self._num_inputs = parameter.num_inputs or 0
        default = "torch" if self._num_inputs else "flat" if path.endswith("bias") else "as_is"
        self._layout = weight.layout or default
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
        shape = list(self._their_shape)
        shape[self.axis] *= self.weight.part[1]
        count = self.parameter.shape[0] if self._stacked else 1
        return {self.weight.name.format(layer=layer): tuple(shape) for layer in range(count)}

    @property
    def axis(self) -> int:
        """The axis of a tensor that has the outputs."""
        return -1 if self._layout == "inputs_first" else 0

    def read(self, tensors: Mapping[str, Tensor], dtype: np.dtype) -> np.ndarray:
        """The weight, cast layer by layer."""
        layers = np.empty((len(self.tensors()), *self._shape), dtype)
        for layer, name in enumerate(self.tensors()):
            index, count = self.weight.part
            with np.errstate(all="ignore"):  # what is too large for the dtype is infinite, and found to be
                layers[layer] = self._ours(np.split(tensors[name].read(), count, self.axis)[index])
                _check_finite(layers[layer], name, tensors[name])
        return layers if self._stacked else layers[0]

    def write(self, layer: int) -> np.ndarray:
        """This weight's part of the tensor of a layer, in float32."""
        weight = self.parameter[...]
        if self._stacked:  # a traced index: compiled once for all layers
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


def _sharding(binding: _Binding, sharding: Sharding | Mesh | None) -> Sharding | None:
    """The sharding of one weight, checked before anything is read."""
    if isinstance(sharding, Mesh):
        return parameter_sharding(binding.parameter, sharding, name=binding.path)
    if sharding is not None:
        shape = tuple(binding.parameter.shape)
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise ValueError(
                f"{binding.path} has shape {shape}, which does not fit {sharding}; give a sharding that fits every "
                "weight, or a mesh, to lay out each weight by its own axes"
            ) from error
    return sharding


def _put(weight: np.ndarray, sharding: Sharding | None) -> jax.Array:
    """The weight on its devices, each of which is sent its own shard only."""
    if sharding is None:
        array = jax.device_put(weight)
    else:
        array = jax.make_array_from_callback(weight.shape, sharding, lambda index: weight[index])
    # Transfers are asynchronous: without the wait, more weights would be read while this one is still on the host.
    return jax.block_until_ready(array)


def _joined(parts: list[tuple[int, _Binding, int]]) -> np.ndarray:
    arrays = [binding.write(layer) for _, binding, layer in sorted(parts, key=lambda part: part[0])]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, parts[0][1].axis)


def _with_originals(tensors: Mapping[str, Tensor], copies: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors, and under the name of each original its copy: a checkpoint may have either, or both."""
    originals = {original: tensors[copy] for copy, original in copies.items() if copy in tensors}
    return originals | dict(tensors)


def _check(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], names: Names, path: Path) -> None:
    """Raise on a tensor that is missing, left over, misshapen or not of floats, and a copy or constant that differs."""
    _raise_on([name for name in wanted if name not in found], f"{path} lacks", "which its config asks for")
    extra = [name for name in found if name not in {*wanted, *names.copies, *names.constants, *names.unread}]
    _raise_on(extra, f"{path} has", "for which its config has no weight")
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
    """Whether two tensors have the same values. NaNs count as equal here: `_check_finite` finds them."""
    return first == second or (
        first.shape == second.shape and np.array_equal(first.read(), second.read(), equal_nan=True)
    )


def _check_finite(values: np.ndarray, name: str, tensor: Tensor) -> None:
    # In blocks, since the booleans of all of a 16-bit weight would take half as much memory as the weight itself.
    flat = values.reshape(-1)
    blocks = (flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK))
    if not all(np.isfinite(block).all() for block in blocks):
        count = int(np.sum(~np.isfinite(values)))
        other = "" if values.dtype == FLOAT32 else ", or load it in float32"
        raise UserError(
            f"{tensor.path}: {name} has {count} values that are NaN, infinite or too large for {values.dtype}; "
            f"get it again{other}, or save the model before it diverged"
        )


def _raise_on(names: Iterable[str], what: str, why: str) -> None:
    names = sorted(names)
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(f"{what} {', '.join(map(shown, names[:SHOWN]))}{more}, {why}")
