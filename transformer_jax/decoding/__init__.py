"""From a step function to sequences: one step, many strategies."""

from transformer_jax.decoding.beam import Beams, beam_search, length_penalty
from transformer_jax.decoding.greedy import Greedy, greedy
from transformer_jax.decoding.sampling import Sampled, sample
from transformer_jax.decoding.step import Reorderable, Step

__all__ = ["Beams", "Greedy", "Reorderable", "Sampled", "Step", "beam_search", "greedy", "length_penalty", "sample"]
