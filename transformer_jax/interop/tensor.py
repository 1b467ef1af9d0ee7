"""An array in a file of weights, described by its header and read on demand."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

MOST_AXES = 32  # of every NumPy
TOO_LARGE = 1 << 63  # bytes, for every NumPy


@dataclass(frozen=True)
class Tensor:
    """An array in a file: its shape and dtype are known, its values are read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    path: Path
    begin: int
    """Its offset in the file, in bytes."""
    strides: tuple[int, ...] | None = None
    """Bytes from one element to the next along each axis; None is row-major."""

    def __post_init__(self) -> None:
        """Raise ValueError on sizes that no file can hold, so that those of a header are safe to compute with."""
        numbers = (self.begin, *self.shape, *(self.strides or ()))
        if len(numbers) > 1 + 2 * MOST_AXES or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a tensor has sizes and offsets that are not a few integers of at least 0")
        if max(numbers) >= TOO_LARGE or prod(size or 1 for size in self.shape) * self.dtype.itemsize >= TOO_LARGE:
            raise ValueError("a tensor is larger than any file")

    @property
    def num_bytes(self) -> int:
        """How many bytes of the file it spans."""
        if self.strides is None or 0 in self.shape:
            return prod(self.shape) * self.dtype.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return last + self.dtype.itemsize

    def read(self) -> np.ndarray:
        """The values: a read-only memory map of the file, which is released with the last reference to it."""
        if 0 in self.shape:  # which not every NumPy can map
            return np.zeros(self.shape, self.dtype)
        content = np.memmap(self.path, np.uint8, "r", self.begin, (self.num_bytes,))
        return np.ndarray(self.shape, self.dtype, content, 0, self.strides)
