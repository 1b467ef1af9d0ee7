import json
import shutil
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from transformer_jax.errors import UserError
from transformer_jax.interop import tensors as module
from transformer_jax.interop.tensors import Writable, open_tensors, write_tensors

FILES = Path(__file__).parent / "files"

ARRAYS = {
    "odd": np.array([1, -2, 3], np.int8),
    "encoder.weight": np.array([[0.5, -1.0, 2.0], [3.0, 4.0, 1e-3]], np.float32),
    "bfloat16": np.array([[1.0, -3.140625], [2.0**100, 0.0]], ml_dtypes.bfloat16),
    "half": np.array([65504.0, 6e-8], np.float16),
    "double": np.array(0.1),
    "count": np.array([2**62, -1]),
    "flags": np.array([[True], [False]]),
    'naïve "名"\n': np.array([7], np.uint32),
    "empty": np.zeros((0, 3), np.float32),
}


def writable(arrays):
    return {name: Writable(array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()}


def assert_equal(tensors, arrays):
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        read = tensors[name].read()
        assert (tensors[name].shape, tensors[name].dtype) == (read.shape, read.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(read, array)


def raw(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_the_safetensors_library_writes_is_read(tmp_path):
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal(open_tensors(tmp_path), ARRAYS)
    assert_equal(open_tensors(tmp_path / "model.safetensors"), ARRAYS)


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    write_tensors(tmp_path / "new" / "folder", writable(ARRAYS))
    (path,) = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "model.safetensors"
    read = load_file(path)
    assert {name: (array.dtype, array.tolist()) for name, array in read.items()} == {
        name: (array.dtype, array.tolist()) for name, array in ARRAYS.items()
    }
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32"),
        *("float64", "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ],
)
def test_dtypes_have_the_names_that_the_library_gives_them(tmp_path, dtype):
    arrays = {"a": np.array([0, 1, 255, 2]).astype(dtype)}
    save_file(arrays, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    assert_equal(open_tensors(tmp_path / "expected.safetensors"), arrays)
    write_tensors(tmp_path, writable(arrays))
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


@pytest.mark.parametrize("length", range(8))  # of a name, and so of the header
def test_a_written_file_is_that_of_the_library_byte_for_byte(tmp_path, length):
    arrays = {name * (length + 1): np.arange(size, dtype=np.float32) for name, size in (("b", 3), ("é", 0), ("a", 2))}
    save_file(arrays, tmp_path / "expected", metadata={"format": "pt"})
    write_tensors(tmp_path, writable(arrays))
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()


def test_torch_reads_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_into_torch

    write_tensors(tmp_path, writable(ARRAYS))
    read = load_into_torch(tmp_path / "model.safetensors")
    assert read["bfloat16"].dtype == torch.bfloat16
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }


def test_elements_are_aligned_to_their_size(tmp_path):
    write_tensors(tmp_path, writable(ARRAYS))
    for tensor in open_tensors(tmp_path).values():
        assert tensor.begin % tensor.dtype.itemsize == 0


def test_arrays_in_any_order_are_written_row_by_row_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 20)
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    arrays = {
        "transposed": array.T,
        "swapped": array.astype(ml_dtypes.bfloat16).swapaxes(0, 1),
        "backwards": array[::-1, :, ::2],
        "spread": np.broadcast_to(array[:, :, :1], (2, 3, 4)),
    }
    write_tensors(tmp_path, writable(arrays))
    assert_equal(open_tensors(tmp_path), arrays)


def test_the_layout_of_the_format(tmp_path):
    header = {
        "b": entry(4, 12, [2]),
        "__metadata__": {"any": "thing"},
        "a": entry(0, 4, [1, 2], "BF16"),
        "nothing": entry(4, 4, [4, 0], "F16"),
        "c": entry(12, 14, [2], "F8_E4M3"),
    }
    data = bytes.fromhex("803f 00c0  0000803f 000000c0  38 c0")  # and the header is of no particular length
    assert_equal(
        open_tensors(raw(tmp_path / "any.safetensors", header, data)),
        {
            "b": np.array([1.0, -2.0], np.float32),
            "a": np.array([[1.0, -2.0]], ml_dtypes.bfloat16),
            "nothing": np.zeros((4, 0), np.float16),
            "c": np.array([1.0, -2.0], ml_dtypes.float8_e4m3fn),
        },
    )


def test_a_tensor_is_read_alone(tmp_path):
    size = 2**36  # of which the disk has nothing but the ends
    path = raw(tmp_path / "model.safetensors", {"large": entry(0, size, [size], "U8"), "a": entry(size, size + 4, [1])})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
        file.seek(0, 2)
        file.write(bytes.fromhex("0000803f"))
    tensors = open_tensors(tmp_path)
    assert tensors["a"].read().tolist() == [1.0]
    assert tensors["large"].shape == (size,)
    large = tensors["large"].read()
    assert large.shape == (size,) and large[size // 2] == 0 and not large.flags.writeable


def test_a_tensor_is_read_once_and_let_go_before_the_next(tmp_path):
    reads, alive = [], []

    def read(name):
        assert all(reference() is None for reference in alive)
        array = np.full(1000, len(reads), np.float32)
        reads.append(name)
        alive.append(weakref.ref(array))
        return array

    names = [f"{number}" for number in range(6)]
    tensors = {name: Writable((1000,), np.dtype(np.float32), lambda name=name: read(name)) for name in names}
    write_tensors(tmp_path, tensors, shard_bytes=8000)
    assert reads == names


def test_shards_hold_what_fits_in_the_order_given(tmp_path):
    sizes = {"h": 50, "e": 30, "d": 10, "c": 1, "b": 100, "a": 20, "f": 20, "g": 1}
    arrays = {name: np.full(size, size, np.uint8) for name, size in sizes.items()}
    write_tensors(tmp_path, writable(arrays), shard_bytes=40)
    shards = {path.name: list(load_file(path)) for path in tmp_path.glob("*.safetensors")}
    assert {name: set(content) for name, content in shards.items()} == {
        "model-00001-of-00006.safetensors": {"h"},
        "model-00002-of-00006.safetensors": {"e", "d"},
        "model-00003-of-00006.safetensors": {"c"},
        "model-00004-of-00006.safetensors": {"b"},
        "model-00005-of-00006.safetensors": {"a", "f"},
        "model-00006-of-00006.safetensors": {"g"},
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 232}
    assert index["weight_map"] == {name: file for file, names in shards.items() for name in names}
    assert len(list(tmp_path.iterdir())) == 7
    assert_equal(open_tensors(tmp_path), arrays)
    assert_equal(open_tensors(tmp_path / "model.safetensors.index.json"), arrays)


def test_no_tensors_are_a_checkpoint_too(tmp_path):
    write_tensors(tmp_path, {})
    assert open_tensors(tmp_path) == {} == load_file(tmp_path / "model.safetensors")


def test_of_several_checkpoints_in_a_folder_the_first_known_counts(tmp_path):
    shutil.copy(FILES / "zip.bin", tmp_path / "some.bin")
    index = {"weight_map": {"scalar": "some.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert {tensor.path.name for tensor in open_tensors(tmp_path).values()} == {"some.bin"}
    shutil.copy(FILES / "legacy.bin", tmp_path / "pytorch_model.bin")
    assert {tensor.path.name for tensor in open_tensors(tmp_path).values()} == {"pytorch_model.bin"}
    assert open_tensors(tmp_path)["scalar"].read() == 7.5
    save_file({"a": np.ones(1)}, tmp_path / "shard.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    assert_equal(open_tensors(tmp_path), {"a": np.ones(1)})
    save_file({"b": np.ones(2)}, tmp_path / "model.safetensors")
    assert_equal(open_tensors(tmp_path), {"b": np.ones(2)})


GOOD = {"a": entry(0, 4, [1]), "b": entry(4, 12, [2])}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (GOOD, 11, r"its tensors end at byte (\d+), the file at byte (?!\1)\d+; get it again"),
        (GOOD, 13, r"its tensors end at byte"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 16, [2])}, 16, r"b begins at byte \d+, where what comes before it ends"),
        ({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, 4, r"b begins at byte"),
        ({"a": entry(-4, 0, [1])}, 0, r"its header says of a"),
        ({"a": entry(2**70, 2**70 + 4, [1])}, 4, r"its header says of a"),
        ({"a": entry(0, 4, [2])}, 4, r"its header says of a"),
        ({"a": entry(0, 4, [-1])}, 4, r"its header says of a"),
        ({"a": entry(4, 0, [-1])}, 4, r"its header says of a"),
        ({"a": entry(0, 4, [1.0])}, 4, r"its header says of a"),
        ({"a": entry(0, 4, 1)}, 4, r"its header says of a"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, r"its header says of a"),
        ({"a": 3}, 4, r"its header says of a"),
        (b"[1]", 0, r"its JSON is not an object"),
        (b'{"a": ', 0, r"Expecting value"),
        (b"\xff\xfe\xfd", 0, r"decode"),
        (b"[" * 100_000, 0, r"its JSON is nested too deeply"),
        (b"", 0, r"its header ends at byte 8, the file at byte 8"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, header, data, message):
    raw(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(UserError, match=rf"^[^\n]*model.safetensors is cut short or damaged: [^\n]*{message}[^\n]*$"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("left", [0, 3, 8, 20])
def test_a_file_cut_short_in_its_header_is_an_error(tmp_path, left):
    write_tensors(tmp_path, writable(ARRAYS))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=rf"header ends at byte \d+, the file at byte {left}; get it again"):
        open_tensors(tmp_path)


def test_a_header_is_not_read_when_it_cannot_be_one(tmp_path):
    path = raw(tmp_path / "model.safetensors", b"{}")
    with path.open("r+b") as file:
        file.write((2**35).to_bytes(8, "little"))
        file.truncate(2**36)
    with pytest.raises(UserError, match="header ends at byte"):
        open_tensors(tmp_path)


def test_a_dtype_that_is_not_known_is_named_with_its_tensor(tmp_path):
    raw(tmp_path / "model.safetensors", {"encoder.weight": entry(0, 1, [2], "F4")}, b"\0")
    with pytest.raises(UserError, match=r"model.safetensors: encoder.weight has dtype F4, .* F32"):
        open_tensors(tmp_path)
    with pytest.raises(ValueError, match=r"encoder.weight has dtype complex128"):
        write_tensors(tmp_path / "new", writable({"encoder.weight": np.zeros(1, complex)}))
    with pytest.raises(ValueError, match=r"encoder.weight has dtype >f4"):
        write_tensors(tmp_path / "new", writable({"encoder.weight": np.zeros(1, ">f4")}))
    assert not (tmp_path / "new").exists()


def test_a_git_pointer_is_not_taken_for_weights(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 440473133\n"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(UserError, match=rf"{name} is not the weights but their Git LFS pointer; run"):
            open_tensors(tmp_path)


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; give the folder of a Hugging Face checkpoint"):
        open_tensors(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"none of model.safetensors, .*model.bin.index.json \(it has nothing\)"):
        open_tensors(tmp_path)
    for name in ("tf_model.h5", "config.json", *"abcdefgh"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors").mkdir()
    there = r"\(it has a, b, c, config.json, d, e, f, g, 3 more\)"
    with pytest.raises(UserError, match=rf"has none of model.safetensors, .* {there}; give the folder"):
        open_tensors(tmp_path)


def test_an_index_must_be_that_of_its_shards(tmp_path):
    index = tmp_path / "model.safetensors.index.json"

    def opened(files):
        index.write_text(json.dumps({"weight_map": files}))
        return open_tensors(tmp_path)

    save_file({"a": np.ones(1)}, tmp_path / "1.safetensors")
    save_file({"b": np.ones(2)}, tmp_path / "2.safetensors")
    assert_equal(opened({"a": "1.safetensors", "b": "2.safetensors"}), {"a": np.ones(1), "b": np.ones(2)})
    with pytest.raises(UserError, match=r"index.json names 3.safetensors, which is not there"):
        opened({"a": "1.safetensors", "c": "3.safetensors"})
    with pytest.raises(UserError, match=r"index.json says that c is in 1.safetensors, which does not have it"):
        opened({"a": "1.safetensors", "c": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(UserError, match=r"index.json says that a is in 2.safetensors, which does not have it"):
        opened({"a": "2.safetensors", "b": "2.safetensors"})
    with pytest.raises(UserError, match=r"index.json says that a is in 2.safetensors, which does not have it"):
        opened({"a": "2.safetensors", "b": "1.safetensors"})
    save_file({"b": np.ones(2), "a": np.zeros(1)}, tmp_path / "2.safetensors")
    with pytest.raises(UserError, match=r"a is in both .*1.safetensors and .*2.safetensors; get them"):
        opened({"a": "1.safetensors", "b": "2.safetensors"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"metadata": {}}',
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
    ],
    ids=range(8),
)
def test_what_is_no_index_is_an_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index.json is not the index of a checkpoint: .*; get it again"):
        open_tensors(tmp_path)


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path):
    def fail():
        assert not list(tmp_path.glob("model*"))
        raise KeyboardInterrupt

    tensors = {**writable({"a": np.zeros(10), "b": np.zeros(10)}), "c": Writable((1,), np.dtype(np.float32), fail)}
    for shard_bytes in (100, 10_000):
        with pytest.raises(KeyboardInterrupt):
            write_tensors(tmp_path, tensors, shard_bytes=shard_bytes)
        assert list(tmp_path.iterdir()) == []


def test_the_index_of_shards_comes_last(tmp_path, monkeypatch):
    moved = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: moved.append(target.name) or replace(self, target))
    write_tensors(tmp_path, writable({"a": np.zeros(10), "b": np.zeros(10)}), shard_bytes=80)
    assert moved[-1] == "model.safetensors.index.json" and len(moved) == 3


@pytest.mark.parametrize("shard_bytes", [10, 10_000])
def test_a_checkpoint_is_not_written_over(tmp_path, shard_bytes):
    write_tensors(tmp_path, writable({"a": np.zeros(2), "b": np.zeros(2)}), shard_bytes=shard_bytes)
    for other in (10, 10_000):
        with pytest.raises(UserError, match=r"already holds a model.safetensors[.a-z]*; give another folder"):
            write_tensors(tmp_path, writable({"a": np.ones(1)}), shard_bytes=other)
    assert_equal(open_tensors(tmp_path), {"a": np.zeros(2), "b": np.zeros(2)})


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written to .*file"):
        write_tensors(tmp_path / "file", {})


@pytest.mark.parametrize("array", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float64)])
def test_an_array_must_be_what_was_said(tmp_path, array):
    with pytest.raises(ValueError, match=r"weight is float\d\d\(\d, \d\) but was declared as float32\(2, 3\)"):
        write_tensors(tmp_path, {"weight": Writable((2, 3), np.dtype(np.float32), lambda: array)})
    assert list(tmp_path.iterdir()) == []
