"""`python -m transformer_jax attention WORKDIR "text"`: a picture of what a trained model attends to."""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from transformer_jax.errors import UserError
from transformer_jax.models import AttentionWeights, Transformer
from transformer_jax.training import Run


@dataclass(frozen=True)
class Attention:
    """Translate a text and draw the encoder's, the decoder's and the cross-attention of it, every head of a layer."""

    workdir: Annotated[Path, tyro.conf.Positional]
    """The folder of the run."""
    text: Annotated[str, tyro.conf.Positional]
    """What to translate."""
    out: Path = Path("attention.png")
    """The picture to write: PNG, SVG or PDF by its suffix."""
    layer: int = -1
    """The layer to draw, counted from 0; negative ones from the last."""
    step: int | None = None
    """The checkpoint to use; the newest by default."""

    def run(self) -> None:
        """Write the picture and print the translation and where the picture is."""
        if not self.text.strip():
            raise UserError("the text is empty")
        run = Run.open(self.workdir)
        model, _ = run.restored_model(self.step)
        translation = draw_attention(run, model, self.text, self.out, layer=self.layer)
        print(translation)
        print(f"wrote {self.out}", file=sys.stderr)


def draw_attention(run: Run, model: Transformer, text: str, out: Path, *, layer: int = -1) -> str:
    """Draw what the model attends to while it translates the text; returns the translation."""
    from transformer_jax.visualize import AttentionPanel, attention_figure, save_figure  # matplotlib is slow to import
    from transformer_jax.visualize.attention import check_suffix

    check_suffix(out)
    tokenizer = run.task.tokenizer
    prompt = run.config.data.prompt(text)
    (translation,) = run.task.translate(model, [prompt], run.strategy)
    (example,) = run.task.encode([{"source": prompt, "target": translation}])
    weights = _weights(model, jnp.array([example["source"]]), jnp.array([example["target"]])[:, :-1])
    num_layers = min(len(weights.encoder), len(weights.decoder))
    if not -num_layers <= layer < num_layers:
        raise UserError(f"layer={layer} is not one of the model's {num_layers} (0 to {num_layers - 1})")
    encoder, decoder, cross = (np.asarray(kind[layer, 0], np.float32) for kind in weights)
    source, target = (tokenizer.tokens([*example[side]]) for side in ("source", "target"))
    panels = [
        AttentionPanel("cross, by the token being written", cross, target[1:], source),
        AttentionPanel("encoder", encoder, source, source),
        AttentionPanel("decoder", decoder, target[:-1], target[:-1]),
    ]
    with warnings.catch_warnings(record=True) as caught:
        figure = attention_figure(panels, title=f"{text} → {translation}, layer {layer % num_layers}")
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, out)
    return translation


@jax.jit
def _weights(model: Transformer, source: jax.Array, target: jax.Array) -> AttentionWeights:
    return model.attention(source, target)
