"""The tensors of a file that `torch.save` wrote, without torch, and without running what the file asks for.

Such a file is a pickle, which is a program, and the storages it refers to. The program may do here what makes a dict of
tensors and nothing else, as with `torch.load(weights_only=True)`. It makes descriptions: the values stay in the
file until they are read. There are two layouts (torch/serialization.py): since torch 1.6 a zip archive, in which the
pickle and each storage are uncompressed entries; before, five pickles one after the other, followed by the storages.
"""

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import ml_dtypes
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.untrusted import LONGEST_PICKLE, checked_pickle, shown

ZIP = b"PK\x03\x04"
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

STORAGES = {
    "DoubleStorage": np.dtype("<f8"),
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("?"),
    "UntypedStorage": np.dtype("u1"),
}
"""The dtype of each class of storage. An untyped storage is bytes, and its tensors have a dtype of their own."""

DTYPES = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
}
"""The dtypes that torch keeps in untyped storages: those that are newer than its typed storages."""


def open_torch_bin(path: Path) -> dict[str, Tensor]:
    """The tensors of a flat dict, by name. Only the pickle is read."""
    try:
        with path.open("rb") as file:
            read = _read_zip if file.peek(len(ZIP)).startswith(ZIP) else _read_legacy
            content, storages = read(path, file)
            file_bytes = file.seek(0, io.SEEK_END)
        return {name: _located(path, name, tensor, storages, file_bytes) for name, tensor in _flat(path, content)}
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(
            f"{path} is cut short, damaged, or not a file of torch.save "
            f"({shown(str(error) or type(error).__name__)}); get it again"
        ) from error


class _Storage(NamedTuple):
    """A flat array in the file, which tensors are views of."""

    key: str
    dtype: np.dtype


class _Tensor(NamedTuple):
    """A tensor as the pickle describes it; offset and strides count elements."""

    storage: _Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Span(NamedTuple):
    """The bytes of the file that a storage is in."""

    begin: int
    num_bytes: int


class _Function(NamedTuple):
    """What the pickle calls instead of a function of torch: a tuple, since pickles set attributes of what has any."""

    name: str

    def __call__(self, *arguments: Any) -> _Tensor:
        return FUNCTIONS[self.name](*arguments)


class _WeightsUnpickler(pickle.Unpickler):
    """Makes descriptions of tensors, and refuses to look up anything that does not serve to do so."""

    def __init__(self, file: io.BytesIO, path: Path):
        super().__init__(file, encoding="utf-8")
        self._path = path
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch", "Size":
                return tuple
            case "torch._utils", _ if name in FUNCTIONS:
                return _Function(name)
            case ("torch", _) | ("torch.storage", "UntypedStorage") if name in STORAGES or name in DTYPES:
                return name
        raise UserError(
            f"{self._path} holds more than weights: it asks to run {shown(f'{module}.{name}')!r}, which is refused; "
            "have somebody you trust save the weights alone, best as safetensors"
        )

    def persistent_load(self, name: Any) -> _Storage:
        match name:
            case ("storage", str(kind), str(key), str(), int(), *view) if kind in STORAGES and not any(view):
                return self.storages.setdefault(key, _Storage(key, STORAGES[kind]))
        items = name if isinstance(name, tuple) else (name,)  # only the outer ones: they may be nested without end
        given = ", ".join(item if isinstance(item, str) else _type(item) for item in items[:5])
        raise ValueError(f"it refers to ({shown(given)}), which is not a storage")


def _unpickled(file: BinaryIO, path: Path) -> tuple[Any, dict[str, _Storage]]:
    """What the pickle at the current position of a file makes, and its storages; the file is left after it."""
    unpickler = _WeightsUnpickler(io.BytesIO(checked_pickle(file)), path)
    return unpickler.load(), unpickler.storages


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _checked(storage, storage.dtype, offset, shape, strides)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: str, *_: Any
) -> _Tensor:
    return _checked(storage, DTYPES[dtype], offset, shape, strides)


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


FUNCTIONS: dict[str, Callable[..., _Tensor]] = {
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_of_dtype,
    "_rebuild_parameter": _parameter,
}
"""The functions of `torch._utils` that make a tensor: from a typed storage, an untyped one, or another tensor."""


def _checked(storage: Any, dtype: np.dtype, offset: Any, shape: Any, strides: Any) -> _Tensor:
    shape, strides = tuple(shape), tuple(strides)
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)):
        raise ValueError("it has a tensor with a shape, strides or offset that are not integers of at least 0")
    return _Tensor(storage, dtype, offset, shape, strides)


def _read_zip(path: Path, file: io.BufferedReader) -> tuple[Any, dict[str, _Span]]:
    """What the pickle of a zip archive makes, and where its storages are: NAME/data.pkl, NAME/data/KEY."""
    with ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise ValueError("it is a zip archive with two entries of one name")
        folder = next((name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")), None)
        if folder is None:
            raise ValueError("it is a zip archive without a data.pkl")
        if any(entry.compress_type != ZIP_STORED for entry in entries.values()):
            raise ValueError("it is a compressed zip archive, which torch.save never writes")
        byte_order = f"{folder}byteorder"
        if byte_order in entries and archive.read(byte_order) != b"little":
            raise UserError(f"{path} is from a big-endian machine; load it with torch and save it on another")
        if entries[f"{folder}data.pkl"].file_size > LONGEST_PICKLE:
            raise ValueError(f"its data.pkl has more than {LONGEST_PICKLE} bytes")
        content, _ = _unpickled(io.BytesIO(archive.read(f"{folder}data.pkl")), path)
    data = f"{folder}data/"
    spans = {name.removeprefix(data): _span(file, entry) for name, entry in entries.items() if name.startswith(data)}
    return content, spans


def _span(file: BinaryIO, entry: ZipInfo) -> _Span:
    """Where an uncompressed entry is: after its local header, whose length is not in the archive's directory."""
    file.seek(entry.header_offset)
    magic, lengths = struct.unpack("<4s22x4s", file.read(30))
    if magic != ZIP:
        raise ValueError(f"{entry.filename} is not where the zip archive says")
    return _Span(entry.header_offset + 30 + sum(struct.unpack("<HH", lengths)), entry.file_size)


def _read_legacy(path: Path, file: io.BufferedReader) -> tuple[Any, dict[str, _Span]]:
    """The same of the layout before torch 1.6: magic, version, machine, content, keys; then storages, in that order."""
    if _unpickled(file, path)[0] != LEGACY_MAGIC or _unpickled(file, path)[0] != LEGACY_PROTOCOL:
        raise ValueError("it does not begin with the magic number of torch")
    _unpickled(file, path)  # byte order and sizes of the machine, which the storages do not depend on
    content, storages = _unpickled(file, path)
    keys, _ = _unpickled(file, path)
    spans = {}
    for key in keys:
        (size,) = struct.unpack("<q", file.read(8))
        if size < 0:
            raise ValueError(f"it has a storage of {size} elements")
        spans[key] = _Span(file.tell(), size * storages[key].dtype.itemsize)
        file.seek(spans[key].num_bytes, io.SEEK_CUR)
    return content, spans


def _flat(path: Path, content: Any) -> Iterable[tuple[str, _Tensor]]:
    """The entries of a dict from names to tensors, which is what the file must hold."""
    wanted, hint = "a flat dict of tensors", "save the weights alone: torch.save(model.state_dict(), path)"
    if not isinstance(content, dict):
        raise UserError(f"{path} holds something of type {_type(content)} and not {wanted}; {hint}")
    for name, tensor in content.items():
        if not isinstance(name, str):
            raise UserError(f"{path} does not hold {wanted}: there is a name of type {_type(name)}; {hint}")
        if not isinstance(tensor, _Tensor):
            raise UserError(f"{path} does not hold {wanted}: {shown(name)!r} is of type {_type(tensor)}; {hint}")
        yield name, tensor


def _type(item: Any) -> str:
    return type(item).__name__.strip("_")


def _located(path: Path, name: str, tensor: _Tensor, storages: dict[str, _Span], file_bytes: int) -> Tensor:
    """The tensor in the file. It must lie within its storage, and that within the file."""
    storage, itemsize = storages[tensor.storage.key], tensor.dtype.itemsize
    offset, strides = tensor.offset * itemsize, tuple(stride * itemsize for stride in tensor.strides)
    located = Tensor(tensor.shape, tensor.dtype, path, storage.begin + offset, strides)
    if storage.begin + storage.num_bytes > file_bytes:
        end = storage.begin + storage.num_bytes
        raise ValueError(f"{shown(name)} ends at byte {end}, the file at byte {file_bytes}")
    if located.num_bytes and offset + located.num_bytes > storage.num_bytes:
        raise ValueError(f"{shown(name)} extends beyond the end of its storage")
    if prod(tensor.shape) * itemsize > file_bytes:  # a view that repeats numbers, which no weight is
        raise ValueError(f"{shown(name)} has shape {tensor.shape}, which is larger than the file")
    return located
