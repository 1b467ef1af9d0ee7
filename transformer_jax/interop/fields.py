"""The fields of a config.json: the kind of value that each has, its default, and the check of all of them."""

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.interop.untrusted import json_object

Json = Mapping[str, Any]

REQUIRED: Any = object()
"""The default of a field that must be given."""

LARGEST_SIZE = 2**24  # more than any vocabulary, width or context has, and no product of a few overflows
MOST_LAYERS = 10_000
LARGEST_NUMBER = 1e30  # a float32 still

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 60


@dataclass(frozen=True)
class Kind:
    """The values that a field may have."""

    expected: str
    """In words, after "it must be"."""
    valid: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Field:
    """A field of config.json that decides what a model is."""

    kind: Kind
    ours: str | None = None
    """The field of our config that means the same, if there is one."""
    default: Any = REQUIRED
    """Its value where config.json leaves it out, as in transformers. Sizes must be given, for no guess is right."""


def whole_number(smallest: int, largest: int = LARGEST_SIZE) -> Kind:
    """Integers in a range. true, 48.0 and "48" are not integers."""
    return Kind(f"a whole number from {smallest} to {largest}", lambda value: _is_whole(value, smallest, largest))


def choice(names: Collection[str]) -> Kind:
    """One of some names."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def optional(kind: Kind) -> Kind:
    """Values of a kind, or null, which is read as None."""
    return Kind(
        f"{kind.expected}, or null",
        lambda value: value is None or kind.valid(value),
        lambda value: None if value is None else kind.convert(value),
    )


def _is_whole(value: Any, smallest: int, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_labels(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(name, str | int | float) for name in value.values()):
        return False
    return sorted(value, key=lambda id: (len(id), id)) == [str(id) for id in range(len(value))]


SIZE = whole_number(1)
COUNT = whole_number(0)
LAYERS = whole_number(1, MOST_LAYERS)
ID = whole_number(0)
RATE = Kind("a number of at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1, float)
POSITIVE = Kind("a positive number", lambda value: _is_number(value) and float(value) > 0, float)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind("a list of names, or null", _is_names, lambda value: value or [])
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LABELS = Kind('an object that names each label by its number, such as {"0": "no", "1": "yes"}', _is_labels)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON."""
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def check_fields(json: Json, fields: Mapping[str, Field], where: str = "config.json") -> dict[str, Any]:
    """The values of `fields` in a config.json, each checked, and the defaults of those that it leaves out."""
    values = {}
    for name, field in fields.items():
        if name in json:
            values[name] = check_field(name, json[name], field.kind, where)
        elif field.default is REQUIRED:
            raise UserError(f"{where} lacks {name}; it must be {field.kind.expected}")
        else:
            values[name] = field.default
    return values


def check_field(name: str, value: Any, kind: Kind, where: str = "config.json") -> Any:
    """The value of a field; raises if it is not of its kind."""
    if not kind.valid(value):
        raise UserError(f"{where}: {name}={short(value)} is invalid; it must be {kind.expected}")
    return kind.convert(value)


def with_aliases(json: Json, aliases: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with each field under its own name, where it was written under an alias."""
    fields = dict(json)
    for alias, name in aliases.items():
        if alias in json and fields.setdefault(name, json[alias]) != json[alias]:
            given = f"{name}={short(fields[name])} and {alias}={short(json[alias])}"
            raise UserError(f"config.json: {given} are one setting; leave out the wrong one")
    return fields


def require(json: Json, values: Json, where: str = "config.json") -> None:
    """Raise if a field is there with another value than the only one that can be loaded. null counts as false."""
    for name, value in values.items():
        given = json.get(name, value)
        if given != value and (given or value):
            raise UserError(f"{where}: {name}={short(given)} cannot be loaded; it must be {short(value)}")


def require_equal(json: Json, name: str, other: str) -> None:
    """Raise unless two fields are equal, where our models have one setting for both; null means equal to the other."""
    if json[name] is not None and json[name] != json[other]:
        values = f"{name}={short(json[name])} and {other}={short(json[other])}"
        raise UserError(f"config.json: {values} cannot be loaded; one setting serves for both, so make them equal")


def short(value: Any) -> str:
    """A value as one short line, however large or deeply nested it is."""
    return _shortened.repr(value)
