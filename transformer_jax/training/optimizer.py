"""The optimizer: Adam(W) with clipping and a schedule, decaying just the weights that are declared to decay."""

from dataclasses import dataclass
from typing import Literal

import jax
import optax
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.layers import is_parameter
from transformer_jax.training.schedule import Schedule, cosine, inverse_square_root, linear


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's settings (Vaswani et al. 2017, 5.3), and what others have added since."""

    schedule: Literal["inverse_square_root", "cosine", "linear"] = "inverse_square_root"
    """After the linear warm-up: fall as 1 / sqrt(step), or to zero at total_steps along a cosine or a line."""
    warmup_steps: int = 4000
    scale: float = 1.0
    """Factor on the paper's d_model^-0.5 * min(n^-0.5, n * warmup^-1.5); for inverse_square_root."""
    peak: float = 1e-3
    """Learning rate at the end of the warm-up; for cosine and linear."""
    total_steps: int | None = None
    """Where cosine and linear reach zero; None takes the steps that the run was begun with."""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    """Decoupled, times the learning rate; never on biases, norms and position tables."""
    clip_norm: float = 0.0
    """Largest global norm of the gradient; 0 does not clip."""

    def __post_init__(self):
        if self.warmup_steps < 1:
            raise UserError(f"warmup_steps must be at least 1; got {self.warmup_steps}")

    def learning_rate(self, d_model: int) -> Schedule:
        """The learning rate as a function of the step."""
        if self.schedule == "inverse_square_root":
            return inverse_square_root(d_model, self.warmup_steps, self.scale)
        if self.total_steps is None:
            raise UserError(f"schedule={self.schedule!r} falls to zero at total_steps, which is None; set it")
        kind = {"cosine": cosine, "linear": linear}[self.schedule]
        return kind(self.peak, self.warmup_steps, self.total_steps)

    def build(self, d_model: int) -> optax.GradientTransformation:
        """The transformation of gradients into updates."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            optax.add_decayed_weights(self.weight_decay, mask=decays) if self.weight_decay else optax.identity(),
            optax.scale_by_learning_rate(self.learning_rate(d_model)),
        )


def decays(model: nnx.Module) -> nnx.Module:
    """The model with True in place of each weight that is declared to decay, and False elsewhere."""
    return jax.tree.map(lambda parameter: parameter.replace(parameter.decay), model, is_leaf=is_parameter)
