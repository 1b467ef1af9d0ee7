"""Records held in memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np

from transformer_jax.data.source import Source, Split, check_split, check_strings, shown
from transformer_jax.errors import UserError


class _Fields(tuple[str, ...]):
    """The setting `fields`, which called is the method `fields` of a source."""

    def __call__(self) -> tuple[str, ...]:
        return tuple(self)


@dataclass(frozen=True, eq=False)
class Records(Source[Any]):
    """Records held in memory, for notebooks: `Records(train=[("a source", "its target")])`.

    A record is a tuple with a value for each field, such as `("a great film", "good")` for the fields text and label,
    or a dict. The config of a run keeps their number and a digest, not the records.
    """

    train: tuple[Any, ...] = ()
    """Records to train on."""
    valid: tuple[Any, ...] = ()
    """Records to evaluate on during the training."""
    test: tuple[Any, ...] = ()
    """Records to evaluate the trained model on."""
    fields: tuple[str, ...] = ()  # type: ignore[assignment]
    """Fields of a record; without any, those of the first record if it is a dict, else source and target."""
    allow_empty: bool = False
    """Keep records of which a text is empty; otherwise they are an error that names them."""

    def __post_init__(self) -> None:
        for name in get_args(Split):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        first = next((record for name in get_args(Split) for record in getattr(self, name)), None)
        fields = self.fields or (first if isinstance(first, Mapping) and first else ("source", "target"))
        object.__setattr__(self, "fields", _Fields(fields))
        for name in get_args(Split):
            checked = tuple(self._checked(name, index, record) for index, record in enumerate(getattr(self, name)))
            object.__setattr__(self, name, checked)

    def split(self, name: Split) -> Sequence[Any]:
        """The records of "train", "valid" or "test", as dicts."""
        check_split(name)
        if not self._is_here:
            raise UserError(
                f"the {sum(self._numbers.values())} records of this run were given in memory and are not kept; give "
                "them again in Python, or data from files on the command line"
            )
        return [self._as_dict(record) for record in getattr(self, name)]

    def to_json(self) -> dict[str, Any]:
        """What the config of a run keeps: the number of records of each split, and a digest of all."""
        return {
            "fields": list(self.fields),
            **self._numbers,
            "digest": self._digest,
            "allow_empty": self.allow_empty,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Records":
        """Records of which only what `to_json` kept is known: equal to those it was made of, but without a split."""
        records = cls(fields=tuple(value["fields"]), allow_empty=value["allow_empty"])
        # Cached properties, which are not computed again.
        vars(records).update(_numbers={name: value[name] for name in get_args(Split)}, _digest=value["digest"])
        return records

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.fields, self._digest, self.allow_empty))

    @property
    def _is_here(self) -> bool:
        return all(len(getattr(self, name)) == number for name, number in self._numbers.items())

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in get_args(Split)}

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name in get_args(Split):
            for record in getattr(self, name):
                values = self._as_dict(record)
                digest.update(_canonical([values[field] for field in self.fields]))
        return digest.hexdigest()

    def _as_dict(self, record: Any) -> dict[str, Any]:
        return record if isinstance(record, Mapping) else dict(zip(self.fields, record, strict=True))  # type: ignore[return-value]

    def _checked(self, name: Split, index: int, record: Any) -> Any:
        wanted = ", ".join(self.fields)
        if isinstance(record, Mapping):
            missing = [field for field in self.fields if field not in record]
            if missing:
                known = ", ".join(map(str, record)) or "nothing"
                raise UserError(f"{name}[{index}] has no {missing[0]!r}, but {known}; the fields are {wanted}")
        elif not isinstance(record, (tuple, list)) or len(record) != len(self.fields):
            raise UserError(
                f"{name}[{index}] is {shown(record)}; give a tuple of {len(self.fields)} values ({wanted}) or a dict, "
                "or name the fields with fields="
            )
        where = partial(str, f"{name}[{index}]")
        check_strings(self._as_dict(record), where, allow_empty=self.allow_empty)
        return record if isinstance(record, Mapping) else tuple(record)


def _canonical(value: Any) -> bytes:
    """Bytes that equal values share and others do not: of each its type and its length come first."""
    if isinstance(value, Mapping):
        items = sorted((str(name), item) for name, item in value.items())
        return b"d%d:" % len(items) + b"".join(_canonical(name) + _canonical(item) for name, item in items)
    if isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(map(_canonical, value))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (str, bytes)):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return b"%c%d:" % (b"s" if isinstance(value, str) else b"b", len(data)) + data
    if value is None or isinstance(value, (bool, int, float, complex)):
        return f"n{value!r};".encode()
    array = np.asarray(value)
    if array.dtype == object:
        raise UserError(f"{shown(value)} in a record is a {type(value).__name__}; give texts, numbers, lists or arrays")
    data = np.ascontiguousarray(array).tobytes()
    return f"a{array.dtype.str}{array.shape}{len(data)}:".encode() + data
