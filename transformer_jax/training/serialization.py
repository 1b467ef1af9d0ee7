"""Configs to and from JSON. A type is found by its name, and nothing is imported to find it."""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from transformer_jax import data, functional, layers, models, tasks
from transformer_jax.errors import UserError

BUILT_IN: tuple[ModuleType, ...] = (models, data, tasks, layers, functional)
PACKAGE = __name__.partition(".")[0]
USER_MODULE = "__transformer_jax_config__"
"""Attribute of the modules that the user has named on the command line."""


def to_json(value: Any) -> Any:
    """A config as JSON. A dataclass becomes an object that names its type, with the module if it is not built in."""
    if hasattr(value, "to_json"):
        return {"type": type_name(type(value)), **value.to_json()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if "type" in fields:
            raise UserError(f"{type(value).__name__} has a field called 'type', which is kept for its name; rename it")
        return {"type": type_name(type(value)), **fields}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_json(kind: Any, value: Any) -> Any:
    """The config of type `kind`, or of a subclass of it, that `to_json` made this of."""
    if isinstance(value, dict):
        if dict in (get_origin(option) or option for option in _options(kind)):
            return value
        chosen = _find(value.get("type"), kind)
        if hasattr(chosen, "from_json"):
            return chosen.from_json({name: item for name, item in value.items() if name != "type"})
        hints = get_type_hints(chosen)
        names = {field.name for field in dataclasses.fields(chosen)}
        unknown = set(value) - names - {"type"}
        if unknown:
            raise UserError(f"{chosen.__name__} has no {sorted(unknown)[0]!r}; the config is of another version")
        given = {name: from_json(hints[name], item) for name, item in value.items() if name != "type"}
        try:
            return chosen(**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"{chosen.__name__}: {error}") from error
    if isinstance(value, list):
        return _sequence(kind, value)
    return Path(value) if isinstance(value, str) and Path in _options(kind) else value


def type_name(kind: type) -> str:
    """What a type is called in JSON: its name, after that of its module if it is not built in."""
    is_built_in = kind.__module__.partition(".")[0] == PACKAGE
    return kind.__name__ if is_built_in else f"{kind.__module__}:{kind.__qualname__}"


def _find(name: Any, kind: Any) -> Any:
    """The type of this name that may stand where a `kind` is expected: built in, or imported by the user."""
    options = [get_origin(option) or option for option in _options(kind)]
    options = [option for option in options if isinstance(option, type)]
    expected = " or ".join(option.__name__ for option in options)
    if not isinstance(name, str):
        raise UserError(f"the config has an object without a type where {expected} was expected")
    module, _, attribute = name.rpartition(":")
    if module:
        modules = [sys.modules[known] for known in (module, "__main__") if known in sys.modules]
        modules += [named for named in sys.modules.values() if getattr(named, USER_MODULE, False)]
        found = next(filter(None, (_nested(known, attribute) for known in modules)), None)
        if found is None:
            raise UserError(
                f"the run uses {attribute}, which is not part of this package but of the module {module}; name its "
                f"file with --config {module.rpartition('.')[2]}.py, or import the module first (to train, in the "
                "config)"
            )
    else:
        known = {option.__name__: option for option in options}
        found = next((vars(known)[name] for known in BUILT_IN if name in vars(known)), known.get(name))
    is_fitting = isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, tuple(options))
    if not is_fitting:
        raise UserError(f"the config has a {name} where {expected} was expected")
    return found


def _sequence(kind: Any, value: list[Any]) -> Any:
    """A list, or the tuple that it was."""
    sequence = next((option for option in _options(kind) if get_origin(option) in (tuple, list)), tuple)
    arguments = get_args(sequence) or (Any, ...)
    if get_origin(sequence) is list:
        return [from_json(arguments[0], item) for item in value]
    kinds = arguments if Ellipsis not in arguments and len(arguments) == len(value) else arguments[:1] * len(value)
    return tuple(from_json(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))


def _nested(module: ModuleType, path: str) -> Any:
    """What a module has under a dotted name."""
    found: Any = module
    for name in path.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
