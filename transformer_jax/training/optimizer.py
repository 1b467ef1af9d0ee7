"""The optimizer: Adam(W) with clipping and a schedule, decaying just the weights that are declared to decay."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.layers import is_parameter, named_parameters
from transformer_jax.training.schedule import Schedule, cosine, inverse_square_root, linear


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's settings (Vaswani et al. 2017, 5.3), and what others have added since."""

    schedule: Literal["inverse_square_root", "cosine", "linear"] = "inverse_square_root"
    """Learning rate after the linear warm-up: falls as 1 / sqrt(step), or to zero at total_steps along a cosine or a
    line."""
    warmup_steps: int = 4000
    """Number of steps over which the learning rate rises linearly."""
    scale: float = 1.0
    """Factor on the paper's d_model^-0.5 * min(n^-0.5, n * warmup^-1.5), for the schedule inverse_square_root."""
    peak: float = 1e-3
    """Learning rate at the end of the warm-up, for the schedules cosine and linear."""
    total_steps: int | None = None
    """Step at which the schedules cosine and linear reach zero; None takes the steps that the run was begun with."""
    beta1: float = 0.9
    """Decay rate of Adam's mean of gradients."""
    beta2: float = 0.98
    """Decay rate of Adam's mean of squared gradients."""
    epsilon: float = 1e-9
    """Number that Adam adds to the root of the mean squared gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay, times the learning rate; never on biases, norms and position tables."""
    clip_norm: float = 0.0
    """Largest global norm of the gradient; 0 does not clip."""
    freeze: str | None = None
    """Regular expression of parameters that are not trained, matched from the beginning of their names, such as
    "embedding|encoder"."""
    layer_decay: float = 1.0
    """Factor on the learning rate of each layer below the top one and of the embeddings below them all; 1 trains all
    layers alike."""

    def __post_init__(self):
        if self.warmup_steps < 1:
            raise UserError(f"warmup_steps must be at least 1; got {self.warmup_steps}")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay must be over 0 and at most 1; got {self.layer_decay}")
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UserError(f"freeze={self.freeze!r} is not a regular expression: {error}") from error

    def learning_rate(self, d_model: int | None) -> Schedule:
        """The learning rate as a function of the step."""
        if self.schedule == "inverse_square_root":
            if d_model is None:
                raise UserError(
                    "schedule='inverse_square_root' is in terms of d_model, which the model's config lacks; "
                    "use cosine or linear"
                )
            return inverse_square_root(d_model, self.warmup_steps, self.scale)
        if self.total_steps is None:
            raise UserError(f"schedule={self.schedule!r} falls to zero at total_steps, which is None; set it")
        kind = {"cosine": cosine, "linear": linear}[self.schedule]
        return kind(self.peak, self.warmup_steps, self.total_steps)

    def build(self, d_model: int | None) -> optax.GradientTransformation:
        """The transformation of gradients into updates."""
        update = optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity(),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            optax.add_decayed_weights(self.weight_decay, mask=decays) if self.weight_decay else optax.identity(),
            optax.scale_by_learning_rate(self.learning_rate(d_model)),
        )
        if self.freeze is not None:
            update = optax.partition({"trained": update, "frozen": optax.set_to_zero()}, self._labels)
        return update if self.layer_decay == 1 else optax.chain(update, _scale_by_layer(self.layer_decay))

    def without_frozen_gradients(self, model: nnx.Module) -> nnx.Module:
        """The model, with no gradients to the parameters that are frozen: their backward pass is not computed."""
        if self.freeze is None:
            return model
        return jax.tree.map(
            lambda x, label: jax.lax.stop_gradient(x) if label == "frozen" else x, model, self._labels(model)
        )

    def _labels(self, model: nnx.Module) -> nnx.Module:
        """The model with "trained" or "frozen" in place of each weight."""
        pattern = re.compile(self.freeze or "")
        names = list(named_parameters(model))
        frozen = {name for name in names if pattern.match(name)}
        if not frozen or len(frozen) == len(names):
            which = "no parameter" if not frozen else "every parameter"
            tops = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UserError(f"optimizer.freeze={self.freeze!r} matches {which}; the names begin with {tops}")
        return _map_named(lambda name, leaf: leaf.replace("frozen" if name in frozen else "trained"), model)


def decays(model: nnx.Module) -> nnx.Module:
    """The model with True in place of each weight that is declared to decay, and False elsewhere.

    Of a weight that was not declared with `layers.parameter`, such as one of Flax's own layers, a matrix decays.
    """

    def decay(parameter: Any) -> Any:
        declared = getattr(parameter, "decay", None)
        return parameter.replace(parameter.ndim > 1 if declared is None else declared)

    return jax.tree.map(decay, model, is_leaf=is_parameter)


def _scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Updates of lower layers times powers of a factor: for fine-tuning (Howard and Ruder 2018, section 3.2)."""

    def scale(updates: Any, parameters: Any = None) -> Any:
        depth = max((leaf.shape[0] for leaf in named_parameters(updates).values() if _is_stacked(leaf)), default=0)

        def factor(name: str, leaf: Any) -> Any:
            if _is_stacked(leaf):
                powers = decay ** jnp.arange(leaf.shape[0] - 1, -1, -1, dtype=jnp.float32)
                return leaf.replace(leaf[...] * powers.reshape(-1, *[1] * (leaf.ndim - 1)))
            return leaf.replace(leaf[...] * decay**depth) if "embedding" in name else leaf

        return _map_named(factor, updates)

    return optax.stateless(scale)


def _is_stacked(leaf: Any) -> bool:
    return getattr(leaf, "axes", ())[:1] == ("layers",)


def _map_named(function: Any, model: Any) -> Any:
    def call(path: Any, leaf: Any) -> Any:
        return function(jax.tree_util.keystr(path, simple=True, separator="."), leaf)

    return jax.tree_util.tree_map_with_path(call, model, is_leaf=is_parameter)
