"""What an example consists of: named columns of arrays, each with its type, its shape and its padding."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from transformer_jax.errors import UserError

Example = Mapping[str, Any]
"""The value of each column: a sequence of items where the column is ragged, else one item."""

INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)
SHOWN = 40  # characters of a wrong value in an error


@dataclass(frozen=True)
class Column:
    """One array of an example: the type and shape of its items, and what fills up a batch."""

    dtype: str = "int32"
    """In a batch."""
    shape: tuple[int, ...] = ()
    """Of one item: () for a token id, (80,) for a frame of 80 features, (28, 28, 1) for an image."""
    padding: float = 0
    """The value of the positions of a batch that hold no item."""
    ragged: bool = True
    """Whether an example has a sequence of items, as a text has tokens, or exactly one, as it has one label."""
    limits: tuple[int, int] | None = None
    """The lowest and the highest integer that a value may be; None is all that the dtype can hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"dtype={self.dtype} is not a type of columns; use bool, an integer type or float32")
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.limits is not None and np.dtype(self.dtype).kind not in "iu":
            raise ValueError(f"limits={self.limits} are of integers, and dtype is {self.dtype}; leave them out")

    @property
    def low_and_high(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        if self.limits is not None:
            return self.limits
        about = np.finfo(self.dtype) if np.dtype(self.dtype).kind == "f" else None
        if about is not None:
            return float(about.min), float(about.max)
        return (0, 1) if self.dtype == "bool" else (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)

    @property
    def storage_dtype(self) -> np.dtype:
        """The narrowest type that holds every value between the limits."""
        if self.limits is None:
            return np.dtype(self.dtype)
        low, high = self.limits
        fitting = (kind for kind in INTEGERS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        return np.dtype(next(fitting, np.dtype(self.dtype)))

    def join(self, name: str, values: Sequence[Any], *, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The items of many examples one after the other, and the number of items of each.

        NumPy would wrap or truncate a value that does not fit; here it is an error.

        Args:
            name: the column's, for errors.
            values: of consecutive examples.
            first: the number of the first of them, for errors.
        """
        arrays = [_array(value) for value in values]
        lengths = np.array([len(array) if self.ragged and array.ndim else 1 for array in arrays], np.int64)
        filled = [array for array in arrays if array.size or not self.ragged]
        if not self._all_fit(arrays):
            self._raise_at_first_misfit(name, values, first)
        stack = np.concatenate if self.ragged else np.stack
        dtype = self.storage_dtype
        return stack([array.astype(dtype) for array in filled] or [np.zeros((0, *self.shape), dtype)]), lengths

    def _all_fit(self, arrays: Sequence[np.ndarray]) -> bool:
        try:
            flat = np.concatenate([array.reshape(-1) for array in arrays if array.size] or [np.zeros(0, self.dtype)])
        except (ValueError, TypeError):
            return False
        shapes = {array.shape[self.ragged :] for array in arrays if array.size or not self.ragged}
        return shapes <= {self.shape} and all(array.ndim >= self.ragged for array in arrays) and self._fits(flat)

    def _fits(self, values: np.ndarray) -> bool:
        kinds = {"f": "iufb", "b": "b"}.get(np.dtype(self.dtype).kind, "iub")
        if values.dtype.kind not in kinds or not values.size:
            return values.dtype.kind in kinds
        low, high = self.low_and_high
        finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        return not finite.size or bool(low <= finite.min() and finite.max() <= high)

    def _raise_at_first_misfit(self, name: str, values: Sequence[Any], first: int) -> None:
        for number, value in enumerate(values, first):
            array = _array(value)
            shape = array.shape[self.ragged :] if array.size or not self.ragged else self.shape
            if array.ndim < self.ragged or (array.dtype != object and shape != self.shape):
                items = f"items of shape {self.shape}" if self.ragged else f"one value of shape {self.shape}"
                raise UserError(f"example {number} has an array of shape {array.shape} as {name!r}; give {items}")
            # Of a list, the values as they are: NumPy has made floats of all where one is.
            is_list = not isinstance(value, np.ndarray) and array.dtype != object
            for item in (np.array(value, object) if is_list else array).reshape(-1):
                single = _array(item)
                if single.ndim or single.dtype == object or not self._fits(single.reshape(-1)):
                    shown = repr(item.item() if isinstance(item, np.generic) else item)
                    raise UserError(f"example {number} has {shown[:SHOWN]} in {name!r}; give {self._expected()}")

    def _expected(self) -> str:
        low, high = self.low_and_high
        kind = np.dtype(self.dtype).kind
        if kind == "b":
            return "True or False"
        return f"numbers that {self.dtype} can hold" if kind == "f" else f"integers from {low:.0f} to {high:.0f}"


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # sequences of different lengths in a sequence
        array = np.empty(len(value), object)
        array[:] = value
        return array


def token_column(num_ids: int, pad_id: int) -> Column:
    """A column of token ids."""
    return Column(padding=pad_id, limits=(0, max(num_ids - 1, 0)))


def to_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Columns as JSON."""
    return {name: asdict(column) for name, column in columns.items()}


def from_json(value: Mapping[str, Any]) -> dict[str, Column]:
    """The columns that `to_json` made this of."""
    columns = {}
    for name, fields in value.items():
        limits = fields["limits"]
        columns[name] = Column(
            **{**fields, "shape": tuple(fields["shape"]), "limits": None if limits is None else tuple(limits)}
        )
    return columns
