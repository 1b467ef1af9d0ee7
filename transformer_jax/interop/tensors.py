"""The tensors of a Hugging Face checkpoint folder, each read on demand, and the writing of such a folder.

A safetensors file is the length of its header in eight bytes, the header in JSON, and the tensors without gaps
(https://huggingface.co/docs/safetensors). We read and write it ourselves: the library does not give 8-bit floats to
NumPy, nor bfloat16 in every version, and it writes only what is all in memory.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import SEEK_END, BufferedReader
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.torch_bin import open_torch_bin
from transformer_jax.interop.untrusted import is_file_name, json_object, shown

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHECKPOINTS = (SINGLE_FILE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
GIT_LFS = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000  # bytes, as in the library
CHUNK_BYTES = 1 << 24  # written at once

DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Writable:
    """An array to be written: its shape and dtype, and a function that makes it when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def open_tensors(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint by name: of its folder, or of one file (safetensors, torch.save, or an index).

    Only headers are read; `tensors[name].read()` reads one tensor. In a folder, the first that exists is opened of
    model.safetensors, model.safetensors.index.json, pytorch_model.bin and pytorch_model.bin.index.json.
    """
    if path.is_dir():
        path = _checkpoint_in(path)
    elif not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face checkpoint, or one file of it")
    return _open_index(path) if path.suffix == ".json" else _open_file(path)


def write_tensors(folder: Path, tensors: Mapping[str, Writable], *, shard_bytes: int = 5_000_000_000) -> None:
    """Write a checkpoint as transformers does, one tensor at a time, all or nothing.

    Args:
        folder: It is created if it does not exist, and must not hold such a checkpoint yet.
        tensors: Each is read once, and released before the next is read.
        shard_bytes: The most bytes of tensors in one file; a larger tensor gets a file of its own. Tensors that fit
            into one file become model.safetensors; otherwise there are several, and model.safetensors.index.json.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; safetensors files have {', '.join(map(str, NAMES))}")
    for name in (SINGLE_FILE, INDEX):
        if (folder / name).exists():
            raise UserError(f"{folder} already holds a {name}; give another folder, or delete it")
    shards = _shards(tensors, shard_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
            for name, shard in shards:
                _write_file(Path(partial, name), shard)
            if len(shards) > 1:
                _write_index(Path(partial, INDEX), shards)
            # The index comes last: without it, shards are not a checkpoint.
            for name in [name for name, _ in shards] + [INDEX] * (len(shards) > 1):
                Path(partial, name).replace(folder / name)
    except OSError as error:
        raise UserError(f"the tensors cannot be written to {folder}: {error}") from error


def _checkpoint_in(folder: Path) -> Path:
    for name in CHECKPOINTS:
        if (folder / name).is_file():
            return folder / name
    there = sorted(path.name for path in folder.iterdir())
    there = [*there[:8], f"{len(there) - 8} more"] if len(there) > 9 else there
    raise UserError(
        f"{folder} has none of {', '.join(CHECKPOINTS)} (it has {', '.join(there) or 'nothing'}); "
        "give the folder of a Hugging Face checkpoint"
    )


def _open_index(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index names; raises if they are not where it says."""
    weight_map = _weight_map(index)
    shards = {file: _open_file(index.parent / file) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise UserError(f"{index} says that {shown(name)} is in {file}, which does not have it; get both again")
    tensors: dict[str, Tensor] = {}
    for shard in shards.values():
        for name in sorted(tensors.keys() & shard.keys()):
            both = f"{tensors[name].path} and {shard[name].path}"
            raise UserError(f"{shown(name)} is in both {both}; get them and {index} again")
        tensors |= shard
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by the index. It must be beside the index, which may come from anywhere."""
    try:
        if index.stat().st_size > LONGEST_HEADER:
            raise ValueError(f"it has more than {LONGEST_HEADER} bytes")
        match json_object(index.read_bytes()):
            case {"weight_map": dict(weight_map)} if weight_map and all(
                isinstance(file, str) for file in weight_map.values()
            ):
                pass
            case _:
                raise ValueError("it has no weight_map from names to files")
    except (OSError, ValueError) as error:
        raise UserError(f"{index} is not the index of a checkpoint: {error}; get it again") from error
    files = dict.fromkeys(weight_map.values())
    for file in files:
        if not is_file_name(file):
            raise UserError(
                f"{index} names {shown(file)}, which is not the name of a file in its folder; do not use it, or get it "
                "from somebody you trust"
            )
    for file in files:
        if not _is_there(index.parent / file):
            raise UserError(f"{index} names {shown(file)}, which is not there; get it, too")
    return weight_map


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or not of this system
        return False


def _open_file(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            if file.peek(len(GIT_LFS)).startswith(GIT_LFS):
                raise UserError(f"{path} is not the weights but their Git LFS pointer; run `git lfs pull` beside it")
            return _read_header(path, file) if path.suffix == ".safetensors" else open_torch_bin(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is cut short or damaged: {error}; get it again") from error


def _read_header(path: Path, file: BufferedReader) -> dict[str, Tensor]:
    """The tensors of a safetensors file. They must fill it without gaps or overlaps, or it is a ValueError."""
    begin = 8 + int.from_bytes(file.read(8), "little")
    file_bytes = file.seek(0, SEEK_END)
    if not 8 < begin <= min(file_bytes, LONGEST_HEADER):
        raise ValueError(f"its header ends at byte {begin}, the file at byte {file_bytes}")
    file.seek(8)
    header = json_object(file.read(begin - 8))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header has a __metadata__ that is not a map from names to text")
    tensors = {name: _described(path, name, entry, begin) for name, entry in header.items()}
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if tensor.begin != end:
            before = f"where what comes before it ends at byte {end}"
            raise ValueError(f"{shown(name)} begins at byte {tensor.begin}, {before}")
        end += tensor.num_bytes
    if end != file_bytes:
        raise ValueError(f"its tensors end at byte {end}, the file at byte {file_bytes}")
    return tensors


def _described(path: Path, name: str, entry: Any, data: int) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise UserError(f"{path}: {shown(name)} has dtype {shown(dtype)}, which is not one of {known}")
            with suppress(ValueError):
                tensor = Tensor(tuple(shape), DTYPES[dtype], path, data + begin)
                if begin >= 0 and type(begin) is type(end) is int and tensor.num_bytes == end - begin:
                    return tensor
    raise ValueError(f"its header says of {shown(name)} {shown(entry)}")


def _shards(tensors: Mapping[str, Writable], shard_bytes: int) -> list[tuple[str, dict[str, Writable]]]:
    """The files to be written, and the tensors of each, in the order given."""
    shards: list[dict[str, Writable]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = _num_bytes(tensor)
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
    if len(shards) == 1:
        return [(SINGLE_FILE, shards[0])]
    return [
        (f"model-{number:05}-of-{len(shards):05}.safetensors", shard) for number, shard in enumerate(shards, start=1)
    ]


def _write_index(path: Path, shards: Sequence[tuple[str, Mapping[str, Writable]]]) -> None:
    sizes = {name: _num_bytes(tensor) for _, shard in shards for name, tensor in shard.items()}
    files = {name: file for file, shard in shards for name in shard}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    path.write_text(json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: Mapping[str, Writable]) -> None:
    # With the largest elements first, and the header a multiple of 8 bytes, each is aligned to its own size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers 4 does not load it
    end = 0
    for name in names:
        begin, end = end, end + _num_bytes(tensors[name])
        dtype, shape = NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name in names:
            _write_values(file, name, tensors[name])


def _write_values(file: BinaryIO, name: str, tensor: Writable) -> None:
    array = np.asarray(tensor.read())
    if (array.shape, array.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(f"{name} is {array.dtype}{array.shape} but was declared as {tensor.dtype}{tensor.shape}")
    size = CHUNK_BYTES // array.itemsize
    for chunk in np.nditer(array, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=size):
        file.write(np.asarray(chunk).tobytes())


def _num_bytes(tensor: Writable) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize
