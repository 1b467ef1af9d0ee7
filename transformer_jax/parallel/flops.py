"""How many floating point operations a function takes in matrix products, counted in its jaxpr."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

TRAIN_FACTOR = 3
"""A train step takes three times the matrix products of the forward pass: the backward pass has two for each of them,
one for the gradient of either factor."""


def matmul_flops(function: Callable[..., Any], *args: Any) -> int:
    """The FLOPs of all matrix products and convolutions of `function(*args)`: 2 m n k for m x k times k x n.

    A scan counts as often as it runs, a `cond` as its most expensive branch, a `shard_map` on all devices, a Pallas
    kernel for its whole grid. Elementwise operations are not counted, nor kernels that are not written in JAX (cuDNN
    attention): count with the reference implementation.

    Args:
        function: anything that JAX can trace. Nothing is computed or compiled.
        args: arrays or, in their place, `jax.ShapeDtypeStruct`s, in any tree.

    Raises:
        ValueError: if a `while_loop` has a matrix product in it, since nobody knows how often it runs.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*args))


def train_flops(forward: Callable[..., Any], *args: Any) -> int:
    """The model FLOPs of one train step: three times the matrix products of its forward pass.

    What is computed again in the backward pass to save memory is not counted, so that FLOPs a second compare runs with
    and without rematerialization (the model FLOPs utilization of Chowdhery et al. 2022, appendix B).

    Args:
        forward: the forward pass of a whole batch, to the loss.
        args: of the forward pass, as in `matmul_flops`.
    """
    return TRAIN_FACTOR * matmul_flops(forward, *args)


def _jaxpr_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: JaxprEqn) -> int:
    params = equation.params
    match equation.primitive.name:
        case "dot_general":
            return _dot_flops(equation)
        case "ragged_dot_general":
            return _ragged_dot_flops(equation)
        case "conv_general_dilated":
            return _convolution_flops(equation)
        case "cond":
            return max(map(_jaxpr_flops, params["branches"]))
        case "while":
            flops = sum(map(_jaxpr_flops, _jaxprs(params)))
            if flops:
                raise ValueError(
                    "a while_loop has matrix products in it, and how often it runs is not known before it does; count "
                    "the function that it calls, or use scan or a fori_loop with constant bounds"
                )
            return 0
        case "scan":
            times = params["length"]
        case "shard_map":
            axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
            times = math.prod(params["mesh"].shape[axis] for axis in axes)
        case "pallas_call":
            times = math.prod(params["grid_mapping"].grid)
        case _:
            times = 1
    return times * sum(map(_jaxpr_flops, _jaxprs(params)))


def _dot_flops(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return _product_flops(equation, contracted)


def _ragged_dot_flops(equation: JaxprEqn) -> int:
    """Rows of the left factor belong to groups: each is multiplied once, however many groups there are."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = _product_flops(equation, contracted)
    num_groups = _shape(equation.invars[2])[-1]
    return flops // num_groups if set(numbers.lhs_ragged_dimensions) & set(contracted) else flops


def _product_flops(equation: JaxprEqn, contracted: Sequence[int]) -> int:
    left = _shape(equation.invars[0])
    return 2 * _size(equation) * math.prod(left[axis] for axis in contracted)


def _convolution_flops(equation: JaxprEqn) -> int:
    """The kernel has as many input channels as one group of features sees."""
    kernel = _shape(equation.invars[1])
    channels_out = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(equation) * (math.prod(kernel) // channels_out)


def _size(equation: JaxprEqn) -> int:
    return math.prod(_shape(equation.outvars[0]))


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                yield item
