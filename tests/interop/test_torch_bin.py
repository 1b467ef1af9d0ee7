import functools
import io
import operator
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.interop.torch_bin import open_torch_bin

FILES = Path(__file__).parent / "files"  # made by make.py, which is in it
NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)

TENSORS = {
    "float64": np.array([[0.1, -2.5]]),
    "float32": np.array([1.5, -2.0, 3.25], np.float32),
    "float16": np.array([0.5, -65504.0], np.float16),
    "bfloat16": np.array([1.0, -3.140625, 2.0**100], ml_dtypes.bfloat16),
    "int64": np.array([2**62, -1]),
    "int32": np.array([2**30, -1], np.int32),
    "int16": np.array([2**14, -1], np.int16),
    "int8": np.array([127, -128], np.int8),
    "uint8": np.array([0, 255], np.uint8),
    "bool": np.array([True, False, True]),
    "uint16": np.array([0, 65535], np.uint16),
    "float8_e4m3fn": np.array([0.5, -448.0], ml_dtypes.float8_e4m3fn),
    "parameter": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
    "scalar": np.array(7.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "whole": NUMBERS,
    "transposed": NUMBERS.T,
    "sliced": NUMBERS[1:, 1::2],
    "repeated": np.array([[5.0, 6.0]] * 3, np.float32),
}


def assert_equal(tensors, arrays):
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        read = tensors[name].read()
        assert (tensors[name].shape, tensors[name].dtype) == (read.shape, read.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(read, array)


def in_zip(path: Path, content: bytes, storages=(), *, folder="archive", compression=zipfile.ZIP_STORED, **records):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{folder}/data.pkl", content)
        for name, record in records.items():
            archive.writestr(f"{folder}/{name}", record)
        for key, storage in enumerate(storages):
            archive.writestr(f"{folder}/data/{key}", storage)
    return path


def in_pickles(path: Path, content: bytes, storages=(), *, magic=None, machine=None, keys=None):
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) if magic is None else magic
    machine = pickle.dumps({"little_endian": True}, 2) if machine is None else machine
    keys = pickle.dumps([str(key) for key in range(len(storages))], 2) if keys is None else keys
    data = b"".join(struct.pack("<q", len(storage) // 4) + storage for storage in storages)
    path.write_bytes(magic + pickle.dumps(1001, 2) + machine + content + keys + data)
    return path


class Torch:
    """A global of torch, or what a call of it makes, to be pickled by its name."""

    def __init__(self, name, arguments=None):
        self.name, self.arguments = name, arguments


class Storage(tuple):
    """A storage, to be pickled as torch names it."""


class TorchPickler(pickle._Pickler):
    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def persistent_id(self, item):
        return tuple(item) if isinstance(item, Storage) else None

    def save_torch(self, item):
        self.write(pickle.GLOBAL + item.name.replace(" ", "\n").encode() + b"\n")
        if item.arguments is not None:
            self.save(item.arguments)
            self.write(pickle.REDUCE)

    dispatch[Torch] = save_torch


def pickled(item) -> bytes:
    file = io.BytesIO()
    TorchPickler(file, 2).dump(item)
    return file.getvalue()


def tensor(shape=(2,), strides=(1,), offset=0, *, storage=None, key="0", kind="torch FloatStorage", view=None):
    storage = Storage(("storage", Torch(kind), key, "cpu", 2, view)) if storage is None else storage
    return Torch("torch._utils _rebuild_tensor_v2", (storage, offset, shape, strides, False, OrderedDict()))


ONE_TWO, THREE_FOUR = struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)


@pytest.mark.parametrize("name", ["zip.bin", "legacy.bin"])
def test_both_layouts_are_read(name):
    assert_equal(open_torch_bin(FILES / name), TENSORS)


@pytest.mark.parametrize("name", ["zip.bin", "legacy.bin"])
def test_tensors_of_one_storage_are_one_part_of_the_file(name):
    tensors = open_torch_bin(FILES / name)
    whole, transposed, sliced = (tensors[name] for name in ("whole", "transposed", "sliced"))
    assert whole.begin == transposed.begin == sliced.begin - 5 * 4
    assert (whole.num_bytes, transposed.num_bytes, sliced.num_bytes) == (48, 48, 28)
    assert not sliced.read().flags.writeable


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_writes_today_is_read(tmp_path, legacy):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    state = model.state_dict()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        state[str(dtype)] = (torch.randn(4, 3, 2) * 9).to(dtype).permute(2, 0, 1)[:, 1:]
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=not legacy)
    tensors = open_torch_bin(tmp_path / "model.bin")
    assert {name: (str(tensor.dtype), tensor.read().tolist()) for name, tensor in tensors.items()} == {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.tolist()) for name, tensor in state.items()
    }
    assert tensors["0.weight"] == tensors["1.weight"]


@pytest.mark.parametrize("write", [in_zip, in_pickles])
def test_the_layouts_written_by_hand(tmp_path, write):
    content = {
        "a": tensor(),
        "b": tensor((2, 2), (0, 1), key="1"),
        "c": tensor((1, 1), (99, 99), 1),
        "none": tensor((0,), (1,), 2**40),
        "sized": tensor(Torch("torch Size", ((1,),))),
        "parameter": Torch("torch._utils _rebuild_parameter", (tensor((), ()), True, OrderedDict())),
    }
    path = write(tmp_path / "model.bin", pickled(content), [ONE_TWO, THREE_FOUR])
    expected = {"a": [1, 2], "b": [[3, 4], [3, 4]], "c": [[2]], "none": [], "sized": [1], "parameter": 1}
    assert_equal(open_torch_bin(path), {name: np.array(value, np.float32) for name, value in expected.items()})


def test_the_folder_in_a_zip_may_have_any_name(tmp_path):
    path = in_zip(tmp_path / "a.bin", pickled({"a": tensor()}), [ONE_TWO], folder="pytorch_model", byteorder="little")
    assert open_torch_bin(path)["a"].read().tolist() == [1, 2]


def test_only_the_pickles_are_read(tmp_path):
    size = 2**34  # floats; the disk has none of them but the last
    content = pickled({"large": tensor((size,)), "last": tensor((1,), (1,), size - 1)})
    path = in_pickles(tmp_path / "model.bin", content, keys=pickle.dumps(["0"], 2) + struct.pack("<q", size))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4 * size)
        file.seek(-4, 2)
        file.write(ONE_TWO[:4])
    tensors = open_torch_bin(path)
    assert tensors["last"].read().tolist() == [1] and tensors["large"].read()[size // 2] == 0


class Attack:
    """Pickled as a call of any function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments

    def __call__(self):
        """Only what can be called is pickled as a function."""


def attacks(command):
    code = f"__import__('os').system({command!r})"
    yield "system", Attack(os.system, command)
    yield "eval", {"a": Attack(eval, code)}
    yield "exec", OrderedDict(a=[({"b": Attack(exec, code)},)])
    yield "getattr", {"a": Attack(Attack(getattr, Attack(__import__, "os"), "system"), command)}
    yield "partial", {"a": Attack(functools.partial(os.system, command))}
    yield "methodcaller", {"a": Attack(operator.methodcaller("system", command), Attack(__import__, "os"))}


CARRIERS = {
    "zip": lambda path, attack: in_zip(path, attack),
    "legacy": lambda path, attack: in_pickles(path, attack),
    "magic": lambda path, attack: in_pickles(path, pickled({}), magic=attack),
    "machine": lambda path, attack: in_pickles(path, pickled({}), machine=attack),
    "keys": lambda path, attack: in_pickles(path, pickled({}), keys=attack),
    "pickle": lambda path, attack: path.write_bytes(attack) and path,
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_file_runs_nothing(tmp_path, carrier, protocol):
    mark = tmp_path / "mark"
    for _, attack in attacks(f"touch {mark}"):
        path = CARRIERS[carrier](tmp_path / "model.bin", pickle.dumps(attack, protocol))
        with pytest.raises(UserError, match=r"model.bin holds more than weights: it asks to run '\w+\.\w+', which is"):
            open_torch_bin(path)
        assert not mark.exists()


def test_those_files_would_have_run_something(tmp_path):
    for name, attack in attacks(f"touch {tmp_path}/$(date +%N)"):
        before = len(list(tmp_path.iterdir()))
        pickle.loads(pickle.dumps(attack))
        assert len(list(tmp_path.iterdir())) == before + 1, name


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "collections Counter",
        "collections OrderedDict.fromkeys",
        "builtins OrderedDict",
        "torch load",
        "torch OrderedDict",
        "torch.storage FloatStorage",
        "torch.storage os",
        "torch._utils _rebuild_tensor_v2.__globals__",
        "torch._utils FloatStorage",
        "torch._utils __builtins__",
        "torch.nn.modules.linear Linear",
        "transformer_jax.interop.torch_bin _tensor",
    ],
)
def test_what_is_no_part_of_a_tensor_is_refused_by_its_name(tmp_path, name):
    path = in_zip(tmp_path / "model.bin", pickled({"a": Torch(name)}))
    with pytest.raises(UserError, match=re.escape(f"it asks to run '{name.replace(' ', '.')}', which is refused")):
        open_torch_bin(path)


@pytest.mark.parametrize("state", [b"}Vname\nVother\ns", b"(N}V__call__\nVother\nst", b"(N}V__code__\nNst"])
@pytest.mark.parametrize(
    "name",
    ["collections OrderedDict", "torch Size", "torch FloatStorage", "torch uint16", "torch._utils _rebuild_tensor_v2"],
)
def test_what_a_file_is_given_it_cannot_change(tmp_path, name, state):
    change = pickle.GLOBAL + name.replace(" ", "\n").encode() + b"\n" + state + pickle.BUILD + pickle.STOP
    with pytest.raises(UserError, match=r"item assignment|has no attribute|cannot set|read-only|can't set|immutable"):
        open_torch_bin(in_zip(tmp_path / "model.bin", change))
    assert_equal(open_torch_bin(FILES / "zip.bin"), TENSORS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"state_dict": {"a": tensor()}, "epoch": 3},
            "a flat dict of tensors: 'state_dict' is of type dict",
        ),
        ({"a": tensor(), "epoch": 3}, "does not hold a flat dict of tensors: 'epoch' is of type int"),
        ({"a": Storage(("storage", Torch("torch FloatStorage"), "0", "cpu", 2))}, "'a' is of type Storage"),
        ({3: tensor()}, "does not hold a flat dict of tensors: there is a name of type int"),
        ([tensor()], "holds something of type list and not a flat dict of tensors"),
        (tensor(), "holds something of type Tensor and not a flat dict of tensors"),
    ],
)
def test_what_is_no_flat_dict_of_tensors_is_said(tmp_path, content, message):
    path = in_zip(tmp_path / "model.bin", pickled(content), [ONE_TWO])
    with pytest.raises(UserError, match=rf"model.bin .*{message}.*; save the weights alone: torch.save\(model.state"):
        open_torch_bin(path)


@pytest.mark.parametrize("write", [in_zip, in_pickles])
@pytest.mark.parametrize(
    "content",
    [
        tensor((3,)),
        tensor((2,), (2,)),
        tensor((2,), (1,), 1),
        tensor((1,), (1,), 2),
        tensor((2,), (1,), -1),
        tensor((2,), (-1,), 1),
        tensor((-2,)),
        tensor((2.0,)),
        tensor((2,), ("1",)),
        tensor((2, 1), (1,)),
        tensor((2,), (1,), None),
        tensor(kind="torch DoubleStorage"),
        tensor(kind="torch uint16"),
        tensor(key="7"),
        tensor(key=0),
        tensor(view=("1", 0, 2)),
        tensor(storage="FloatStorage"),
        tensor(storage=Storage(("module", "a", "b", "c"))),
        tensor(storage=Storage(("storage", "file", "0", "cpu", 2))),
        Torch("torch._utils _rebuild_tensor_v2", ()),
        Torch("torch._utils _rebuild_tensor_v3", (3, 0, (2,), (1,), False, None, "uint16")),
        Torch("torch FloatStorage", ()),
    ],
)
def test_a_tensor_must_be_in_its_storage(tmp_path, write, content):
    path = write(tmp_path / "model.bin", pickled({"a": content}), [ONE_TWO])
    with pytest.raises(UserError, match=r"model.bin is cut short, damaged, or not a file of torch.save \(.+\); get it"):
        open_torch_bin(path)


@pytest.mark.parametrize("kind", ["torch uint16", "torch Size"])
def test_a_storage_must_be_of_a_kind_that_is_known(tmp_path, kind):
    path = in_zip(tmp_path / "model.bin", pickled({"a": tensor(kind=kind)}), [ONE_TWO])
    with pytest.raises(UserError, match=r"\(it refers to \(storage, .*\), which is not a storage\); get it again"):
        open_torch_bin(path)


@pytest.mark.parametrize("name", ["zip.bin", "legacy.bin"])
def test_a_file_cut_short_anywhere_is_an_error(tmp_path, name):
    content = (FILES / name).read_bytes()
    path = tmp_path / "model.bin"
    for left in (*range(0, len(content), 29), len(content) - 1):
        path.write_bytes(content[:left])
        with pytest.raises(UserError, match=r"cut short|holds more than weights"):
            open_torch_bin(path)


def test_other_files_are_an_error(tmp_path):
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/file", "text")
    with pytest.raises(UserError, match=r"not a file of torch.save \(it is a zip archive without a data.pkl\)"):
        open_torch_bin(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(
        UserError, match=r"not a file of torch.save \(it does not begin with the magic number of torch\)"
    ):
        open_torch_bin(path)
    path.write_bytes((FILES / "legacy.bin").read_bytes().replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2), 1))
    with pytest.raises(
        UserError, match=r"not a file of torch.save \(it does not begin with the magic number of torch\)"
    ):
        open_torch_bin(path)
    in_zip(path, pickled({"a": tensor()}), [ONE_TWO], compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match=r"not a file of torch.save \(it is a compressed zip archive"):
        open_torch_bin(path)
    in_zip(path, pickled({"a": tensor()}), [ONE_TWO], byteorder="big")
    with pytest.raises(UserError, match=r"model.bin is from a big-endian machine"):
        open_torch_bin(path)
    with pytest.raises(UserError, match=r"nowhere is .* \(.*No such file"):
        open_torch_bin(tmp_path / "nowhere")


def test_an_entry_must_be_where_the_zip_archive_says(tmp_path):
    path = in_zip(tmp_path / "model.bin", pickled({"a": tensor()}), [ONE_TWO])
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x03\x04", 4)] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"archive/data/0 is not where the zip archive says"):
        open_torch_bin(path)


def bomb(opcodes: bytes) -> bytes:
    """A pickle of a dict that does something else before."""
    return b"\x80\x04" + opcodes + b"0" + pickled({"a": tensor()})[2:]


def nested(depth: int) -> bytes:
    """A tuple of one tuple ten times, of one tuple ten times, ..., as a storage."""
    return b"\x80\x02)" + b"q\x01" + (b"(" + b"h\x01" * 10 + b"tq\x01") * depth + b"Q."


@pytest.mark.parametrize("write", [in_zip, in_pickles])
@pytest.mark.parametrize(
    "content",
    [
        bomb(b"Nr\xff\xff\xff\x0f"),
        bomb(b"Np99999999\n"),
        bomb(b"B\xff\xff\xff\x7f"),
        bomb(b"X\xff\xff\xff\x7f"),
        bomb(b"\x8e" + struct.pack("<Q", 2**33)),
        bomb(b"\x8e" + struct.pack("<Q", 2**62)),
        bomb(b"\x8d" + struct.pack("<Q", 2**64 - 1)),
        bomb(b"\x8b" + struct.pack("<i", 2**31 - 1)),
        bomb(b"I" + b"9" * 5000 + b"\n"),
        nested(30),
        pickled({"a": tensor((2**40,), (0,))}),
        pickled({"a": tensor((2**40, 2**40), (0, 0))}),
        pickled({"a": tensor((0, 2**62), (1, 1))}),
        pickled({"a": tensor((1,) * 99, (1,) * 99)}),
        pickled({"a": tensor((10**5000,), (0,))}),
        pickled({"a": tensor((True,), (1,))}),
        pickled({"a": tensor((), (), 10**30)}),
    ],
    ids=range(17),
)
def test_nothing_is_allocated_by_what_a_pickle_says(tmp_path, write, content):
    path = write(tmp_path / "model.bin", content, [ONE_TWO])
    tracemalloc.start()
    try:
        with pytest.raises(
            UserError, match=r"^[^\n]*model.bin is cut short, damaged, or not a file of[^\n]*\Z"
        ) as caught:
            open_torch_bin(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**22 and len(str(caught.value)) < 1000


def test_names_of_others_are_one_short_line(tmp_path):
    for content in ({"a\n" * 999: 3}, {"a": Torch("os\x1b " + "x" * 9999)}):
        path = in_zip(tmp_path / "model.bin", pickled(content), [ONE_TWO])
        with pytest.raises(UserError, match=r"^[^\n]*\Z") as caught:
            open_torch_bin(path)
        assert len(str(caught.value).encode()) < 1000


def test_a_zip_archive_has_each_name_once(tmp_path):
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled({"a": tensor()}))
        archive.writestr("archive/data/0", ONE_TWO)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data/0", THREE_FOUR)
    with pytest.raises(UserError, match="two entries of one name"):
        open_torch_bin(path)


def test_a_storage_has_a_size(tmp_path):
    path = in_pickles(tmp_path / "model.bin", pickled({"a": tensor((0,))}), [b""])
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<q", -(2**40)))
    with pytest.raises(UserError, match="a storage of -"):
        open_torch_bin(path)
