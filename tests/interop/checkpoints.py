"""The checkpoints of tests/reference, loaded, changed and compared."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.reference import REFERENCES, Arrays
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained
from transformer_jax.interop.tensors import open_tensors
from transformer_jax.layers import named_parameters


@cache
def loaded(name: str):
    return from_pretrained(REFERENCES[name].folder)


def assert_same_weights(first: nnx.Module, second: nnx.Module) -> None:
    ours, others = named_parameters(first), named_parameters(second)
    assert ours.keys() == others.keys()
    for path, parameter in ours.items():
        np.testing.assert_array_equal(parameter[...], others[path][...], path)


def changed(folder: Path, name: str, tensors: Arrays | None = None, **fields) -> Path:
    """A copy of a checkpoint with other tensors or fields; those that are None here are left out."""
    reference = REFERENCES[name]
    arrays = {name: tensor.read() for name, tensor in open_tensors(reference.folder).items()} | (tensors or {})
    save_file({name: array for name, array in arrays.items() if array is not None}, folder / "model.safetensors")
    kept = {field: value for field, value in reference.fields.items() if field not in fields}
    given = {field: value for field, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept | given))
    return folder


def assert_refused(message: str, call: Callable, *arguments) -> None:
    """The message is part of the one line that the error has."""
    with pytest.raises(UserError, match=f"^[^\n]*{message}[^\n]*\\Z"):
        call(*arguments)


def tensor_of(name: str, tensor: str) -> np.ndarray:
    return open_tensors(REFERENCES[name].folder)[tensor].read()
