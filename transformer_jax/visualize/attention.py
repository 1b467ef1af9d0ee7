"""Heat maps of attention weights: one row per kind of attention, one map per head, with the tokens on their axes."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text

from transformer_jax.errors import UserError
from transformer_jax.visualize.fonts import font_families, missing_message, sentence, visible

# White where nothing is attended to, then darker in steps that look equal: their distances in OKLab are.
_STEPS = ("#ffffff", "#bde9ff", "#80ceff", "#51acf7", "#3b87e0", "#3764bb", "#33458d", "#292c5d", "#191731")
COLOUR_MAP = LinearSegmentedColormap.from_list("attention", _STEPS)
GREY = "0.4"
DPI = 150
HEADS_PER_LINE = 8
LONGEST_LABEL = 24
SUFFIXES = (".png", ".svg", ".pdf")

# In inches.
MARGIN = 0.2
GAP = 0.24
PAD = 0.06
TITLE = 0.16
NAME = 0.16
HEAD = 0.3
BAR_WIDTH = 0.12
BAR_HEIGHT = 1.6
BAR_LABELS = 0.55


@dataclass(frozen=True, eq=False)
class AttentionPanel:
    """The attention maps of all heads of one attention layer, with the tokens that label their axes."""

    name: str
    """The title of the row of heat maps, such as "decoder self-attention"."""
    weights: Float[np.ndarray, "N T S"]
    """Attention weights after the softmax: each row sums to 1, or to 0 for a query with nothing to attend to."""
    queries: Sequence[str]
    """The tokens that attend, one per row."""
    keys: Sequence[str]
    """The tokens that are attended to, one per column."""

    def __post_init__(self):
        weights = np.asarray(self.weights, dtype=np.float32)
        object.__setattr__(self, "weights", weights)
        panel = f'panel "{self.name}"'
        if weights.ndim != 3 or not weights.size:
            raise ValueError(
                f"{panel}: weights must have shape [heads, queries, keys], none of them 0, not {weights.shape}"
            )
        for count, plural, singular, tokens in (
            (weights.shape[1], "queries", "query", self.queries),
            (weights.shape[2], "keys", "key", self.keys),
        ):
            if count != len(tokens):
                raise ValueError(
                    f"{panel}: weights have {count} {plural} but {len(tokens)} {singular} tokens were given"
                )
        if not (weights.min() >= -1e-3 and weights.max() <= 1.01):
            raise ValueError(
                f"{panel}: weights must lie in 0..1 but range from {weights.min():.3g} to {weights.max():.3g}; "
                "give the weights after the softmax and without dropout"
            )


def attention_figure(panels: Sequence[AttentionPanel], *, title: str = "") -> Figure:
    """Draw one row of heat maps per panel and one column per head, on one colour scale from 0 to 1.

    The size of the figure follows the number of tokens and heads; more than 8 heads take several lines. Characters that
    no installed font shows are drawn as code points, and a warning names them. A notebook shows the figure once
    `%matplotlib inline` has run.
    """
    if not panels:
        raise ValueError("panels is empty; give at least one AttentionPanel")
    texts = [title, *(text for panel in panels for text in (panel.name, *panel.queries, *panel.keys))]
    families, missing = font_families(texts)
    if missing:
        warnings.warn(missing_message(missing), stacklevel=2)
    return _Drawing(panels, families, missing).draw(title)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(_unknown_suffix(path))
    options: dict[str, Any] = {"pil_kwargs": {"compress_level": 9}} if Path(path).suffix.lower() == ".png" else {}
    figure.savefig(path, dpi=DPI, facecolor="white", **options)


def check_suffix(path: str | Path) -> None:
    """Raise, for a command, unless the suffix of `path` is that of a format of figures."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UserError(_unknown_suffix(path))


def _unknown_suffix(path: str | Path) -> str:
    return f'cannot write a figure as "{Path(path).suffix}" ({path}); use .png, .svg or .pdf'


class _Drawing:
    """A figure laid out in inches from its top left corner. Its size is set once everything is laid out.

    Lengths are whole pixels of a PNG, so that its cells are equally large.
    """

    def __init__(self, panels: Sequence[AttentionPanel], families: list[str], missing: str):
        self.panels = panels
        self.missing = missing
        self.font: dict[str, Any] = {"fontfamily": families, "parse_math": False, "color": "black"}
        self.figure = Figure(dpi=DPI, facecolor="white")
        self.boxes: list[tuple[Axes, float, float, float, float]] = []
        self.texts: list[tuple[Text, float, float]] = []
        self.sizes: dict[str, tuple[float, float]] = {}

        longest = max(max(panel.weights.shape[1:]) for panel in panels)
        self.cell = max(_whole(min(0.65 / math.sqrt(longest), 8 / longest)), 1 / DPI)
        self.font_size = min(9.0, max(4.0, 0.85 * 72 * self.cell))
        self.every = math.ceil(1.1 * self.font_size / (72 * self.cell))  # one token in so many has room for a label
        widths = [self.measure(label)[0] for panel in panels for label in self.labels(panel.queries)]
        self.left = _whole(MARGIN + max(widths) + PAD)
        self.pitch = _whole(max(self.cell * max(panel.weights.shape[2] for panel in panels), 0.5) + GAP)

    def draw(self, title: str) -> Figure:
        """Draw the title, the panels one below the other, and the colour bar beside the first."""
        y = MARGIN
        if title:
            y += TITLE
            self.write(title, MARGIN, y, size=13)
            y += GAP
        for panel in self.panels:
            y = self.draw_panel(panel, y) + GAP
        right = self.draw_colour_bar(GAP + max(x + w for _, x, _, w, _ in self.boxes))

        width = _whole(max([right, *(x + _inches(text)[0] for text, x, _ in self.texts)]) + MARGIN)
        height = _whole(max(y + h for _, _, y, _, h in self.boxes) + MARGIN)
        self.figure.set_size_inches(width, height)
        for axes, x, y, w, h in self.boxes:
            axes.set_position((x / width, 1 - (y + h) / height, w / width, h / height))
        for text, x, y in self.texts:
            text.set_position((x / width, 1 - y / height))
        return self.figure

    def draw_panel(self, panel: AttentionPanel, y: float) -> float:
        """Draw the name of a panel and its heads, in lines of equal length, below `y`; return where they end."""
        num_heads, num_queries, num_keys = panel.weights.shape
        columns = math.ceil(num_heads / math.ceil(num_heads / HEADS_PER_LINE))
        queries, keys = self.labels(panel.queries), self.labels(panel.keys)
        sizes = [self.measure(label) for label in keys]
        angles = [90 if len(key) > 1 or width > self.cell else 0 for key, (width, _) in zip(keys, sizes, strict=True)]
        label_height = max(width if angle else height for angle, (width, height) in zip(angles, sizes, strict=True))
        y += NAME
        end = self.write(panel.name, MARGIN, y, size=11)
        self.write("queries ↓   keys →", end + GAP, y, size=8, color=GREY)
        for start in range(0, num_heads, columns):
            y = _whole(y + HEAD + label_height + PAD)
            for column, head in enumerate(range(start, min(start + columns, num_heads))):
                axes = self.axes(self.left + column * self.pitch, y, num_keys * self.cell, num_queries * self.cell)
                axes.imshow(
                    panel.weights[head], cmap=COLOUR_MAP, vmin=0, vmax=1, interpolation="nearest", aspect="auto"
                )
                axes.set_title(f"head {head + 1}", fontsize=8, color=GREY, pad=72 * (label_height + PAD) + 3)
                self.draw_ticks(axes, queries if column == 0 else [], keys, angles)
            y += num_queries * self.cell + GAP
        return y - GAP

    def draw_ticks(self, axes: Axes, queries: list[str], keys: list[str], angles: list[int]) -> None:
        """Write the queries down the side and the keys along the top, and rule thin lines between the cells."""
        style: dict[str, Any] = {"fontsize": self.font_size, **self.font}
        axes.tick_params(
            which="both", length=0, pad=72 * PAD / 2, top=True, labeltop=True, bottom=False, labelbottom=False
        )
        axes.set_xticks(np.arange(len(keys)) * self.every, keys, **style)
        axes.set_yticks(np.arange(len(queries)) * self.every, queries, **style)
        for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
            label.set_rotation(angle)
        if self.cell > 0.08:
            left, right, bottom, top = axes.images[0].get_extent()
            line: dict[str, Any] = {"colors": "0.92", "linewidths": 0.4, "antialiaseds": False}
            axes.vlines(np.arange(left + 1, right), bottom, top, **line)
            axes.hlines(np.arange(top + 1, bottom), left, right, **line)
        for spine in axes.spines.values():
            spine.set(color="0.7", linewidth=0.5)

    def draw_colour_bar(self, x: float) -> float:
        """Draw the colour bar beside the first heat map, right of `x`; return where its labels end."""
        first, _, y, _, height = self.boxes[0]
        axes = self.axes(x, y, BAR_WIDTH, max(height, BAR_HEIGHT))
        bar = self.figure.colorbar(first.images[0], cax=axes, ticks=[0, 0.25, 0.5, 0.75, 1])
        bar.set_label("attention weight", fontsize=8, color=GREY)
        bar.outline.set(color="0.7", linewidth=0.5)
        axes.tick_params(labelsize=8, length=2, width=0.5, color=GREY, labelcolor=GREY)
        return x + BAR_WIDTH + BAR_LABELS

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        axes = self.figure.add_axes((0, 0, 1, 1), label=str(len(self.boxes)))
        axes.grid(False)  # a style may have turned it on
        self.boxes.append((axes, x, y, width, height))
        return axes

    def write(self, text: str, x: float, y: float, *, size: float, color: str = "black") -> float:
        """Write a line of text whose baseline begins at (x, y); return the x where it ends."""
        line = self.figure.text(0, 0, sentence(text, self.missing), fontsize=size, **{**self.font, "color": color})
        self.texts.append((line, x, y))
        return x + _inches(line)[0]

    def labels(self, tokens: Sequence[str]) -> list[str]:
        labels = [visible(token, self.missing) for token in tokens[:: self.every]]
        return [label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1].strip() + "…" for label in labels]

    def measure(self, label: str) -> tuple[float, float]:
        if label not in self.sizes:
            text = self.figure.text(0, 0, label, fontsize=self.font_size, **self.font)
            self.sizes[label] = _inches(text)
            text.remove()
        return self.sizes[label]


def _inches(text: Text) -> tuple[float, float]:
    box = text.get_window_extent()
    return box.width / DPI, box.height / DPI


def _whole(inches: float) -> float:
    return round(inches * DPI) / DPI
