"""`transformer-jax attention RUN "text"`: a picture of what a trained model attends to."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from transformer_jax.atomic import atomic
from transformer_jax.commands.runs import RunCommand, require_ability
from transformer_jax.commands.streams import argument_text
from transformer_jax.errors import UserError
from transformer_jax.parallel import Peers
from transformer_jax.tasks import GivesAttention, Predictor
from transformer_jax.training import Run

LONGEST_TITLE = 160  # characters


@dataclass(frozen=True)
class Attention(RunCommand):
    """Give a text to a trained model and draw what attends to what, every head of a layer."""

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = ""
    """Text that the model reads."""
    out: Path = Path("attention.png")
    """Picture to write, as PNG, SVG or PDF by its suffix."""
    layer: int = -1
    """Layer to draw, counted from 0, or with a negative number from the last."""

    def run(self, peers: Peers) -> None:
        """Write the picture and print what the model writes and where the picture is."""
        text = argument_text("text", self.text)
        if not text.strip():
            raise UserError("the text is empty; give it after the run, in quotes")
        run = self.open()
        require_ability(run.task, GivesAttention, "give attention maps")
        model, _ = self.restore(run)
        write = peers.index == 0
        if written := draw_attention(run, run.predictor(model), text, self.out, layer=self.layer, write=write):
            print(written)
        if write:
            print(f"wrote {self.out}", file=sys.stderr)


def draw_attention(run: Run, predictor: Predictor, text: str, out: Path, *, layer: int = -1, write: bool = True) -> str:
    """Draw what the model attends to when it is given the text; returns what it writes.

    Of several processes all compute it, and one is to `write` the picture.
    """
    from transformer_jax.visualize import AttentionPanel, attention_figure, save_figure  # matplotlib is slow to import
    from transformer_jax.visualize.attention import check_suffix

    check_suffix(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a picture in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with run.precision():
        written, maps = run.task.attention(run.config.data.prompt(text), predictor)  # type: ignore[attr-defined]
    num_layers = min(len(found.weights) for found in maps)
    if not -num_layers <= layer < num_layers:
        raise UserError(f"layer={layer} is not one of the model's {num_layers} (0 to {num_layers - 1})")
    if not write:
        return written
    panels = [
        AttentionPanel(found.title, np.asarray(found.weights[layer], np.float32), found.queries, found.keys)
        for found in maps
    ]
    title = f"{text} → {written}" if written else text
    with warnings.catch_warnings(record=True) as caught:
        figure = attention_figure(panels, title=f"{_line(title)}, layer {layer % num_layers}")
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    with atomic(out) as unfinished:
        save_figure(figure, unfinished)
    return written


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_TITLE else f"{line[: LONGEST_TITLE - 1]}…"
