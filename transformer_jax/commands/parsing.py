"""Command lines to typed values. A setting that is wrong is one line; a flag that is wrong is explained by tyro."""

import contextlib
import dataclasses
import inspect
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

import tyro

from transformer_jax.data import Records
from transformer_jax.errors import UserError

T = TypeVar("T")


def parse(
    kind: type[T], arguments: Sequence[str], *, prog: str, description: str | None = None, default: Any = None
) -> T:
    """The value of a dataclass that the arguments ask for.

    Args:
        kind: the dataclass.
        arguments: of the command line.
        prog: what the user typed before them, for help and errors.
        description: of the command; what the dataclass says of itself by default.
        default: an instance of the dataclass, whose values are the defaults.
    """
    settings: dict[str, Any] = {
        "args": list(arguments),
        "prog": prog,
        "description": inspect.cleandoc(description or kind.__doc__ or ""),
        "config": (tyro.conf.AvoidSubcommands,),
    }
    if default is not None:
        kind = _concrete(kind, default)
        settings["default"] = kind(
            **{field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not resolve type parameter")  # of a bare Source
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # of a ValueError, tyro would make a box and leave with 2
                return tyro.cli(kind, console_outputs=False, **settings)
        except SystemExit as stop:
            if error := _user_error(stop):
                raise error from None
        with _flowing_help():
            return tyro.cli(kind, **settings)  # again, for its help or its own error


def take_fields(kind: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments that are flags of a dataclass, and the rest, which are somebody else's: a config's, for one.

    A --help before anything else is the dataclass's own.
    """
    flags = {f"--{field.name.replace('_', '-')}": field.type is bool for field in dataclasses.fields(kind)}
    own: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, _ = argument.partition("=")
        name = name.replace("_", "-")
        is_switch = flags.get(name, flags.get(f"--{name.removeprefix('--no-')}") is True)
        if name in flags or is_switch or (name in ("-h", "--help") and not rest):
            own.append(argument)
            own += [] if is_switch or has_value or name not in flags else [*islice(remaining, 1)]
        else:
            rest.append(argument)
    return own, rest


def with_settings(kind: type[T], settings: Mapping[str, Any], *, without_prefix: Sequence[str] = ()) -> type[T]:
    """A dataclass with more fields, each a config whose fields become flags.

    Args:
        kind: the dataclass.
        settings: the default of each new field.
        without_prefix: those whose flags are `--name`, and not `--field.name`.
    """
    types = {
        name: Annotated[type(value), tyro.conf.arg(name="")] if name in without_prefix else type(value)
        for name, value in settings.items()
    }
    fields = [(name, types[name], dataclasses.field(default=value)) for name, value in settings.items()]
    namespace = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True)


def _concrete(kind: type[T], default: Any) -> type[T]:
    """The dataclass with the types that the configs in it really have, for which tyro makes flags."""
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    fields = [
        (name, _flag_type(value), dataclasses.field(default=value))
        for name, value in values.items()
        if dataclasses.is_dataclass(value)
    ]
    namespace = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(kind,), namespace=namespace, frozen=True, kw_only=True
    )


def _flag_type(value: Any) -> Any:
    """What flags are made for; records in memory have none."""
    kind = type(value)
    return Annotated[kind, tyro.conf.Suppress, tyro.conf.Fixed] if isinstance(value, Records) else kind


@contextlib.contextmanager
def _flowing_help() -> Iterator[None]:
    """While inside, tyro joins the lines of a field's docstring. It keeps the breaks before lines that are indented."""
    strings = getattr(tyro, "_strings", None)
    join = getattr(strings, "remove_single_line_breaks", None)
    if strings is None or join is None:  # another version: then help has more lines than it needs
        yield
        return
    strings.remove_single_line_breaks = lambda text: join(inspect.cleandoc(text))
    try:
        yield
    finally:
        strings.remove_single_line_breaks = join


def _user_error(error: BaseException | None) -> UserError | None:
    """The user's mistake that led to this, if one did."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
