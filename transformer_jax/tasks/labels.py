"""The names of labels: found in the training set, kept with the model."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformer_jax.errors import UserError

SHOWN, LONGEST = 8, 20  # names in a message, and characters of one


def labelled(model: Any, names: Iterable[str]) -> Any:
    """The config of a model with these labels. One that knows all of them already keeps those that it has."""
    found = set(names)
    if not found:
        raise UserError("the train split is empty, so there are no labels")
    known = model.label_names or tuple(map(str, range(model.num_labels or 0)))
    if found <= set(known):
        return replace(model, label_names=known)
    ordered = sorted(found, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    return replace(model, num_labels=len(ordered), label_names=tuple(ordered))


def label_index(name: str, names: tuple[str, ...]) -> int:
    """The number of a label."""
    try:
        return names.index(name)
    except ValueError:
        raise UserError(f"the label {name!r} is unknown; the training set has {described(names)}") from None


def described(names: tuple[str, ...]) -> str:
    """How many labels there are, and some of them, for people."""
    shown = ", ".join(name if len(name) <= LONGEST else f"{name[:LONGEST]}…" for name in names[:SHOWN])
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} label{'s' * (len(names) != 1)} ({shown}{more})"
