"""Checkpoints that transformers wrote, and what it computes with them; `make.py` says how they were made."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED, GRADIENTS = "expected.npz", "gradients.safetensors"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Reference:
    """A checkpoint of transformers, and a forward pass through it."""

    name: str

    @property
    def folder(self) -> Path:
        """Where the checkpoint is."""
        return FIXTURES / self.name

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Its config.json."""
        return json.loads((self.folder / "config.json").read_text())

    @property
    def architecture(self) -> str:
        """The class of transformers that it is of."""
        return self.fields["architectures"][0]

    @property
    def inputs(self) -> Arrays:
        """What went into the model, by the names of its arguments."""
        return self._expected("input")

    @property
    def before(self) -> Arrays:
        """What went into it first, whose memory the inputs came with; nothing for most."""
        return self._expected("before")

    @property
    def outputs(self) -> Arrays:
        """What came out, by the names of transformers."""
        return self._expected("output")

    @property
    def labels(self) -> np.ndarray:
        """Of the loss whose gradients are known, where they are."""
        with np.load(self.folder / EXPECTED) as file:
            return file["labels"]

    @property
    def gradients(self) -> Arrays:
        """Of that loss, by the names of the tensors."""
        return load_file(self.folder / GRADIENTS)

    def _expected(self, kind: str) -> Arrays:
        with np.load(self.folder / EXPECTED) as file:
            return {name.removeprefix(f"{kind}."): file[name] for name in file if name.startswith(f"{kind}.")}


REFERENCES = {path.name: Reference(path.name) for path in sorted(FIXTURES.glob("*"))}
