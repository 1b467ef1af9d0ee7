import re
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.interop.weights import Names, Weight, load_weights, renamed, weights_to_write
from transformer_jax.layers import Linear, named_parameters, parameter, zeros

FOLDER = Path("some/folder")


class Model(nnx.Module):
    """Weights of any shape, by their names; those of linear maps have a number of axes that are inputs."""

    def __init__(self, **shapes: tuple[tuple[int, ...], int | None]):
        for name, (shape, num_inputs) in shapes.items():
            axes = {f"axis_{number}": size for number, size in enumerate(shape)}
            setattr(self, name, parameter(nnx.Rngs(0), axes, zeros, decay=True, num_inputs=num_inputs))


def tensors(arrays):
    """As they come from a file."""
    return {
        name: SimpleNamespace(
            shape=array.shape, dtype=array.dtype, path=FOLDER / "a.bin", read=lambda array=array: array
        )
        for name, array in arrays.items()
    }


def load(model: nnx.Module, weights: dict[str, Weight], arrays, **others):
    return load_weights(lambda: model, Names(weights, **others), tensors(arrays), FOLDER)


def written(model: nnx.Module, weights: dict[str, Weight]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, tensor in weights_to_write(model, Names(weights)).items():
        arrays[name] = tensor.read()
        assert (arrays[name].shape, arrays[name].dtype) == (tensor.shape, tensor.dtype)
    return arrays


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "num_inputs", "layout", "their_shape", "index_of"),
    [
        ((2, 3, 4), 1, "torch", (12, 2), lambda i, n, h: (4 * n + h, i)),
        ((2, 3, 4), 2, "torch", (4, 6), lambda n, h, o: (o, 3 * n + h)),
        ((2, 3, 4), 1, "inputs_first", (2, 12), lambda i, n, h: (i, 4 * n + h)),
        ((2, 3, 4), 2, "inputs_first", (6, 4), lambda n, h, o: (3 * n + h, o)),
        ((2, 3, 4), 1, "outputs_first", (3, 4, 2), lambda i, n, h: (n, h, i)),
        ((2, 3, 4), 2, "outputs_first", (4, 2, 3), lambda n, h, o: (o, n, h)),
        ((2, 3, 4), 1, "as_is", (2, 3, 4), lambda i, n, h: (i, n, h)),
        ((3, 4), None, "flat", (12,), lambda n, h: (4 * n + h,)),
        ((3, 4), None, "row", (1, 12), lambda n, h: (0, 4 * n + h)),
        ((3, 4), None, "corner", (1, 1, 12), lambda n, h: (0, 0, 4 * n + h)),
        ((3, 4), None, "as_is", (3, 4), lambda n, h: (n, h)),
    ],
)
@pytest.mark.parametrize("num_layers", [None, 3])
def test_a_layout_says_where_each_number_is(shape, num_inputs, layout, their_shape, index_of, num_layers):
    whole = shape if num_layers is None else (num_layers, *shape)
    ours, weights = numbered(whole), {"w": Weight("w" if num_layers is None else "layers.{layer}.w", layout)}
    theirs = {}
    for layer in range(num_layers or 1):
        array = np.full(their_shape, np.nan, np.float32)
        one = ours if num_layers is None else ours[layer]
        for index, value in np.ndenumerate(one):
            array[index_of(*index)] = value
        theirs["w" if num_layers is None else f"layers.{layer}.w"] = array
    model = load(Model(w=(whole, num_inputs)), weights, theirs)
    np.testing.assert_array_equal(model.w[...], ours)
    again = written(model, weights)
    assert again.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(again[name], array)


def test_a_layout_that_is_not_said_is_that_of_torch():
    shapes = {"weight": ((2, 3, 4), 1), "bias": ((3, 4), None), "output_bias": ((3, 4), None), "table": ((5, 2), None)}
    weights = {name: Weight(name) for name in shapes}
    found = {name: tensor.shape for name, tensor in weights_to_write(Model(**shapes), Names(weights)).items()}
    assert found == {"weight": (12, 2), "bias": (12,), "output_bias": (12,), "table": (5, 2)}


@pytest.mark.parametrize(
    ("shape", "num_inputs", "layout", "axis"),
    [((2, 3, 4), 1, "torch", 0), ((2, 3, 4), 1, "inputs_first", 1), ((3, 4), None, "flat", 0), ((3, 4), 1, "as_is", 0)],
)
def test_several_weights_are_parts_of_one_tensor(shape, num_inputs, layout, axis):
    names = ["value", "query", "key"]  # in no order
    part = {"query": 0, "key": 1, "value": 2}
    weights = {name: Weight("layers.{layer}.qkv", layout, (part[name], 3)) for name in names}
    alone = {name: Weight("layers.{layer}." + name, layout) for name in names}
    model = Model(**dict.fromkeys(names, ((2, *shape), num_inputs)))
    for number, name in enumerate(names):
        getattr(model, name)[...] = jnp.asarray(numbered((2, *shape)) + 1000 * number)
    expected = written(model, alone)
    joined = written(model, weights)
    assert joined.keys() == {"layers.0.qkv", "layers.1.qkv"}
    for layer in range(2):
        in_order = [expected[f"layers.{layer}.{name}"] for name in ("query", "key", "value")]
        np.testing.assert_array_equal(joined[f"layers.{layer}.qkv"], np.concatenate(in_order, axis))
    again = load(Model(**dict.fromkeys(names, ((2, *shape), num_inputs))), weights, joined)
    for name in names:
        np.testing.assert_array_equal(getattr(again, name)[...], getattr(model, name)[...])


def test_a_weight_keeps_what_was_declared_of_it():
    model = load_weights(
        lambda: Linear({"embed": 2}, {"heads": 3, "head": 4}, rngs=nnx.Rngs(0)),
        Names({"weight": Weight("w"), "bias": Weight("b")}),
        tensors({"w": numbered((12, 2)), "b": numbered((12,))}),
        FOLDER,
    )
    assert (model.weight.axes, model.weight.decay, model.weight.num_inputs) == (("embed", "heads", "head"), True, 1)
    assert (model.bias.axes, model.bias.decay) == (("heads", "head"), False)
    x = np.array([[1.0, 10.0]], np.float32)
    np.testing.assert_array_equal(model(x).reshape(1, 12), x @ numbered((12, 2)).T + numbered((12,)))


def test_weights_are_known_by_their_paths():
    inner = nnx.Module()
    inner.projection = Linear({"embed": 2}, {"ff": 3}, rngs=nnx.Rngs(0))
    outer = nnx.Module()
    outer.encoder, outer.nothing, outer.number = inner, None, 3
    assert named_parameters(outer).keys() == {"encoder.projection.weight", "encoder.projection.bias"}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_numbers_become_float32(dtype):
    values = np.array([[1.5, -2.0], [3.0, 0.0]]).astype(dtype)
    model = load(Model(w=((2, 2), 1)), {"w": Weight("w")}, {"w": values})
    assert model.w.dtype == jnp.float32
    np.testing.assert_array_equal(model.w[...], values.T.astype(np.float32))


def test_initial_weights_are_never_computed():
    traced = []

    def initializer(key, shape, dtype):
        traced.append(isinstance(key, jax.core.Tracer))
        return jnp.zeros(shape, dtype)

    def make():
        model = nnx.Module()
        model.w = parameter(nnx.Rngs(0), {"a": 2}, initializer, decay=False)
        return model

    load_weights(make, Names({"w": Weight("w")}), tensors({"w": numbered((2,))}), FOLDER)
    assert traced == [True]


def test_a_tensor_to_be_written_is_made_when_its_turn_comes():
    model = Model(first=((2,), None), second=((2,), None))
    weights = {"first": Weight("b"), "second": Weight("a")}
    to_write = weights_to_write(model, Names(weights))
    assert list(to_write) == ["a", "b"]
    model.first[...] = jnp.ones(2)
    np.testing.assert_array_equal(to_write["b"].read(), np.ones(2))


WEIGHTS = {"table": Weight("table.weight"), "scale": Weight("layers.{layer}.scale")}
SHAPES = {"table": ((3, 2), None), "scale": ((2, 4), None)}
ARRAYS = {"table.weight": numbered((3, 2)), "layers.0.scale": np.ones(4), "layers.1.scale": np.zeros(4)}
COPIES = {"head.weight": "table.weight", "other.weight": "table.weight"}
CONSTANTS = {"positions.weight": lambda: np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)}


def assert_refused(message: str, arrays, **others) -> None:
    with pytest.raises(UserError, match=f"^{FOLDER}[^\n]*{message}[^\n]*\\Z"):
        load(Model(**SHAPES), WEIGHTS, {name: array for name, array in arrays.items() if array is not None}, **others)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table.weight": None}, "lacks table.weight, which its config asks for"),
        ({"layers.1.scale": None}, "lacks layers.1.scale, which"),
        ({"table.weight": None, "layers.1.scale": None}, "lacks layers.1.scale, table.weight, which"),
        ({"layers.2.scale": np.ones(4)}, "has layers.2.scale, for which its config has no weight"),
        ({name: np.ones(1) for name in "dcba"}, "has a, b, c and 1 more, for which"),
        ({"layers.1.scale": np.ones(5)}, r"layers.1.scale has shape \(5,\), but its config asks for \(4,\)"),
        ({"table.weight": np.ones((2, 3))}, r"table.weight has shape \(2, 3\), but its config asks for \(3, 2\)"),
        ({"table.weight": np.ones((3, 2, 1))}, r"table.weight has shape \(3, 2, 1\), but"),
    ],
)
def test_tensors_that_are_missing_left_over_or_misshapen_are_named(change, message):
    assert_refused(message, ARRAYS | change)


def test_a_copy_is_the_original_wherever_there_is_no_other():
    rest = {name: array for name, array in ARRAYS.items() if name != "table.weight"}
    table = ARRAYS["table.weight"]
    for names in (["table.weight", "head.weight"], ["head.weight"], ["other.weight"], ["head.weight", "other.weight"]):
        model = load(Model(**SHAPES), WEIGHTS, rest | dict.fromkeys(names, table), copies=COPIES)
        np.testing.assert_array_equal(model.table[...], table)
    assert_refused("lacks table.weight", rest, copies=COPIES)
    assert_refused("has head.weight, for which", ARRAYS | {"head.weight": table})


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_differs_is_an_error(copy):
    table = ARRAYS["table.weight"]
    for other in (np.nextafter(table, np.float32(9)), table[:2], table.T):
        message = f"{copy} differs from table.weight, but its config says that they are one"
        assert_refused(message, ARRAYS | {copy: other}, copies=COPIES)


def test_what_a_model_computes_may_be_there_in_16_bits():
    table = CONSTANTS["positions.weight"]()
    for values in (table, table.astype(np.float16), table + 1e-3):
        load(Model(**SHAPES), WEIGHTS, ARRAYS | {"positions.weight": values}, constants=CONSTANTS)
    load(Model(**SHAPES), WEIGHTS, ARRAYS, constants=CONSTANTS)
    for values in (table + 1e-2, table[:2], -table, table * np.nan):
        message = "positions.weight is not what a model of its config computes there"
        assert_refused(message, ARRAYS | {"positions.weight": values}, constants=CONSTANTS)


def test_what_nothing_reads_may_be_there_and_is_not_read():
    found = tensors(ARRAYS) | {"old.weight": SimpleNamespace(shape=(7,), read=lambda: pytest.fail("read"))}
    names = Names(WEIGHTS, unread=("old.weight",))
    model = load_weights(lambda: Model(**SHAPES), names, found, FOLDER)
    np.testing.assert_array_equal(model.scale[...], [[1, 1, 1, 1], [0, 0, 0, 0]])


def test_nothing_is_read_before_all_is_known_to_fit():
    found = tensors(ARRAYS | {"layers.1.scale": np.ones(5)})
    for tensor in found.values():
        tensor.read = lambda: pytest.fail("read")
    with pytest.raises(UserError, match=re.escape("layers.1.scale has shape (5,)")):
        load_weights(lambda: Model(**SHAPES), Names(WEIGHTS), found, FOLDER)


def test_each_layer_is_read_once():
    reads = count()
    found = tensors(ARRAYS)
    for tensor in found.values():
        tensor.read = lambda read=tensor.read: (next(reads), read())[1]
    load_weights(lambda: Model(**SHAPES), Names(WEIGHTS), found, FOLDER)
    assert next(reads) == 3


NOT_WEIGHTS = [np.int8, np.uint8, np.int64, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", NOT_WEIGHTS)
@pytest.mark.parametrize("name", ["table.weight", "layers.1.scale", "head.weight"])
def test_a_tensor_that_is_not_of_floats_is_not_a_weight(dtype, name):
    array = np.ones(ARRAYS.get(name, ARRAYS["table.weight"]).shape).astype(dtype)
    message = (
        f"a.bin: {name} has dtype {np.dtype(dtype)}, but a weight has one of float16, bfloat16, float32, float64; "
    )
    assert_refused(message, ARRAYS | {name: array}, copies=COPIES)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["table.weight", "layers.0.scale", "layers.1.scale"])
def test_a_weight_that_is_not_finite_is_named(dtype, value, name):
    array = ARRAYS[name].astype(dtype)
    array[..., -1] = value
    count = array[..., -1].size
    assert_refused(f"a.bin: {name} has {count} values that are NaN, infinite or too", ARRAYS | {name: array})
    assert_refused("a.bin: head.weight differs from table.weight", ARRAYS | {"head.weight": array}, copies=COPIES)


@pytest.mark.parametrize("index", range(6))
def test_every_value_is_checked_however_many_are_checked_at_once(monkeypatch, index):
    monkeypatch.setattr("transformer_jax.interop.weights.BLOCK", 4)
    table = ARRAYS["table.weight"].copy()
    table.flat[index] = np.inf
    assert_refused("a.bin: table.weight has 1 values that are NaN", ARRAYS | {"table.weight": table})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("value", "fits"), [(1e300, False), (-3.5e38, False), (3.4e38, True), (-1e-300, True)])
def test_a_weight_must_fit_into_float32(value, fits):
    arrays = ARRAYS | {"table.weight": np.full((3, 2), value)}
    if fits:
        found = load(Model(**SHAPES), WEIGHTS, arrays).table[...]
        np.testing.assert_array_equal(found, np.full((3, 2), value, np.float32))
    else:
        assert_refused("a.bin: table.weight has 6 values that are NaN, infinite or too large for float32", arrays)


def test_only_the_part_that_is_read_is_looked_at_and_no_part_is_left_out():
    names = ["query", "key", "value"]
    weights = {name: Weight("qkv", "flat", (number, 3)) for number, name in enumerate(names)}
    for index in range(6):
        array = numbered((6,))
        array[index] = np.nan
        with pytest.raises(UserError, match="qkv has 1 values that are NaN"):
            load(Model(**dict.fromkeys(names, ((2,), None))), weights, {"qkv": array})


def test_one_weight_at_a_time_is_looked_at():
    alive, most = [0], [0]

    def read(array):
        copy = array.copy()
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(copy, lambda: alive.__setitem__(0, alive[0] - 1))
        return copy

    found = tensors(ARRAYS)
    for tensor in found.values():
        tensor.read = lambda inner=tensor.read: read(inner())
    load_weights(lambda: Model(**SHAPES), Names(WEIGHTS), found, FOLDER)
    assert most == [1] and alive == [0]


def test_what_gets_one_name_must_be_one_thing():
    def rename(name):
        return None if name == "old" else name.removeprefix("bert.").replace("gamma", "weight")

    table = numbered((3, 2))
    found = renamed(tensors({"bert.x.gamma": table, "y": table, "old": table}), rename)
    assert list(found) == ["x.weight", "y"]
    for same in (table, table.astype(np.float16), table.copy()):
        assert list(renamed(tensors({"bert.x": table, "x": same}), rename)) == ["x"]
    for other in (np.nextafter(table, np.float32(9)), table[:2], table.reshape(2, 3), table * np.nan):
        for first, second in (("bert.x", "x"), ("x", "bert.x"), ("bert.x.gamma", "x.weight")):
            message = f"^{FOLDER}/a.bin: {second} differs from {first}, and both are the weight x[^\n]*\\Z"
            with pytest.raises(UserError, match=message):
                renamed(tensors({first: table, second: other}), rename)
