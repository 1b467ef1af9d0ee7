"""Figures of attention weights and of position encodings."""

from transformer_jax.visualize.attention import AttentionPanel, attention_figure, save_figure
from transformer_jax.visualize.positions import position_figure

__all__ = ["AttentionPanel", "attention_figure", "position_figure", "save_figure"]
