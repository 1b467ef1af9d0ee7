"""A figure of a position encoding: its values, and the similarity of any two positions."""

import warnings

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from transformer_jax.visualize.fonts import font_families, missing_message, sentence


def position_figure(encodings: Float[np.ndarray, "T D"], *, title: str = "") -> Figure:
    """Draw a heat map of the encoding PE, one row per position, and beside it the dot products PE(i)·PE(j)."""
    values = np.asarray(encodings, dtype=np.float32)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"encodings must have shape [length, d_model], none of them 0, not {values.shape}")
    families, missing = font_families(title)
    if missing:
        warnings.warn(missing_message(missing), stacklevel=2)

    figure = Figure(figsize=(10, 4.4), dpi=150, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(sentence(title, missing), fontsize=13, fontfamily=families, parse_math=False)
    left, right = figure.subplots(1, 2)
    largest = float(np.abs(values).max()) or 1.0
    encoding = left.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest", aspect="auto")
    products = right.imshow(values @ values.T, cmap="viridis", interpolation="nearest")
    left.set(title="PE(i)", xlabel="dimension", ylabel="position i")
    right.set(title="PE(i) · PE(j)", xlabel="position j", ylabel="position i")
    for axes, image in ((left, encoding), (right, products)):
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
        figure.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=8)
    return figure
