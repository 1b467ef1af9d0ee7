"""Prepared sets of TensorFlow Datasets, from tfrecord, which TensorFlow reads, to array_record, which needs none."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress

from transformer_jax.errors import UserError


def add_array_record(folder: Path, splits: Any) -> None:
    """Copy tfrecord files to array_record files beside them, and name the format where TFDS looks for it.

    The records stay as they are, serialized examples. The format is named last: what is not named is not read.
    """
    from tensorflow_datasets.core import dataset_info
    from tensorflow_datasets.core.file_adapters import ArrayRecordFileAdapter

    with TemporaryDirectory(dir=folder, prefix="incomplete.") as temporary:
        shards: list[tuple[Any, Any, int]] = []
        for split in splits.values():
            template = split.filename_template.replace(data_dir=temporary, filetype_suffix="array_record")
            made = template.sharded_filepaths(split.num_shards)
            shards += zip(split.filepaths, made, split.shard_lengths, strict=True)
        for old, new, _ in shards:
            if old.name == new.name:
                raise UserError(f"{old} has no format in its name; prepare the set as array_record in another data_dir")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for old, new, length in progress.track(shards, description="converting"):
                ArrayRecordFileAdapter.write_examples(new, enumerate(_tfrecords(old)))
                if (found := ArrayRecordFileAdapter.num_examples(new)) != length:
                    raise UserError(f"{old} has {found} records in place of {length}; copy or prepare the set again")
        for _, new, _ in shards:
            new.replace(folder / new.name)
        proto = dataset_info.read_proto_from_builder_dir(folder)
        proto.alternative_file_formats.append("array_record")
        dataset_info.write_dataset_info_proto(proto, dataset_info_dir=temporary)
        dataset_info.dataset_info_path(temporary).replace(dataset_info.dataset_info_path(folder))


def _tfrecords(shard: Path) -> Iterator[bytes]:
    """The records of a file: of each its length, a checksum of that, its bytes, a checksum of those.

    The first checksum finds what is cut or overwritten. The second would take Python minutes a gigabyte.
    """
    with shard.open("rb") as file:
        while header := file.read(12):
            length = int.from_bytes(header[:8], "little")
            record = file.read(length + 4) if header[8:] == _checksum(header[:8]) else b""
            if len(record) < length + 4:
                raise UserError(f"{shard} is cut short, damaged or compressed; copy or prepare the set again")
            yield record[:-4]


@lru_cache(maxsize=1 << 16)  # many records have the same length
def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset, as tfrecord files hold it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")
