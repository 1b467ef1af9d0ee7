"""The optimizer: Adam(W), Adafactor, Lion or Muon, with clipping and a schedule; only declared weights decay."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.layers import is_stacked, map_named_parameters, named_parameters
from transformer_jax.training.schedule import Schedule, cosine, inverse_square_root, linear
from transformer_jax.training.update_rules import clip_rms, map_weights, muon_or_adam, scale_by_factored_rms

Kind = Literal["adam", "adafactor", "lion", "muon"]
MomentDtype = Literal["float32", "bfloat16"]

_BETAS = {"adam": (0.9, 0.98), "adafactor": (0.0, 1.0), "lion": (0.9, 0.99), "muon": (0.95, 0.95)}
"""beta1 and beta2 where they are None: of the papers, and of Jordan 2024 for Muon."""

_EPSILON = {"adam": 1e-9, "muon": 1e-9}


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam with the paper's settings (Vaswani et al. 2017, 5.3), and what others have added since.

    The learning rate is absolute for every kind. A rate for Adam also suits Adafactor, which does not multiply updates
    by the scale of the weights here and clips their root mean square at 1, and Muon, whose updates have a root mean
    square of 0.2. Lion's updates are signs: they need a rate 3 to 10 times smaller, and a weight decay as much larger.
    """

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
    kind: Kind = "adam"
    """Update rule: adam; adafactor, which needs the least memory; lion, which needs learning rates 3 to 10 times
    smaller; or muon, which orthogonalizes the updates of linear maps and leaves all other weights to Adam."""
    beta1: float | None = None
    """Decay rate of the mean of gradients, and in lion the weight of that mean in the update; None takes 0.9 for adam
    and lion, 0.95 for the linear maps of muon (Adam's part always has 0.9), and 0 for adafactor: no mean is kept."""
    beta2: float | None = None
    """Decay rate of the mean of squared gradients in adam and in the Adam part of muon, upper bound of it in adafactor,
    and in lion the decay rate of the mean of gradients; None takes 0.98, 0.95, no bound, and 0.99."""
    epsilon: float | None = None
    """Number added to the root of the mean squared gradient in adam and in the Adam part of muon; None takes 1e-9."""
    moment_dtype: MomentDtype = "float32"
    """Precision in which the mean of gradients is kept; the mean of squared gradients is float32 in any case."""
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
        self._check_kind()
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UserError(f"freeze={self.freeze!r} is not a regular expression: {error}") from error

    def _check_kind(self) -> None:
        for name, options in (("kind", get_args(Kind)), ("moment_dtype", get_args(MomentDtype))):
            if getattr(self, name) not in options:
                raise UserError(f"{name}={getattr(self, name)!r} is unknown; choose {', '.join(options)}")
        beta1, beta2 = self.betas
        if not 0 <= beta1 < 1:
            raise UserError(f"beta1 must be at least 0 and below 1; got {beta1}")
        if not (0 <= beta2 < 1 or (beta2 == 1 and self.kind == "adafactor")):
            raise UserError(f"beta2 must be at least 0 and below 1; got {beta2}")
        if self.epsilon is not None and self.kind not in _EPSILON:
            raise UserError(f"epsilon={self.epsilon} is Adam's and kind={self.kind!r} has none; set epsilon=None")
        if self.moment_dtype == "bfloat16":
            if self.kind == "adafactor" and not beta1:
                raise UserError(
                    "moment_dtype='bfloat16' is of the mean of gradients, which kind='adafactor' keeps with beta1 over "
                    "0 only; set beta1, or moment_dtype='float32'"
                )
            name, rate = ("beta2", beta2) if self.kind == "lion" else ("beta1", beta1)
            if np.asarray(rate, jnp.bfloat16) == 1:
                raise UserError(
                    f"{name}={rate} is 1 in bfloat16, so that the mean of gradients would not decay; set "
                    f"moment_dtype='float32', or {name} to at most 0.995"
                )

    @property
    def betas(self) -> tuple[float, float]:
        """beta1 and beta2, those of the kind where they are None."""
        beta1, beta2 = _BETAS[self.kind]
        return beta1 if self.beta1 is None else self.beta1, beta2 if self.beta2 is None else self.beta2

    def to_json(self) -> dict[str, Any]:
        """The settings, with numbers for what the kind decides: a run is known by what it was trained with."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return given | {name: value for name, value in _decided(self.kind).items() if given[name] is None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "OptimizerConfig":
        """The config that `to_json` made this of, with None for what the kind decides alike."""
        unknown = set(value) - {field.name for field in fields(cls)}
        if unknown:
            raise UserError(f"{cls.__name__} has no {sorted(unknown)[0]!r}; the config is of another version")
        settings = dict(value)
        for name, number in _decided(value.get("kind", cls.kind)).items():
            if settings.get(name) == number:
                settings[name] = None
        return cls(**settings)

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
            self._update_rule(),
            optax.add_decayed_weights(self.weight_decay, mask=decays) if self.weight_decay else optax.identity(),
            optax.scale_by_learning_rate(self.learning_rate(d_model)),
        )
        if self.freeze is not None:
            update = optax.partition({"trained": update, "frozen": optax.set_to_zero()}, self._labels)
        return update if self.layer_decay == 1 else optax.chain(update, _scale_by_layer(self.layer_decay))

    def _update_rule(self) -> optax.GradientTransformation:
        """Gradients into updates of a learning rate of one."""
        beta1, beta2 = self.betas
        epsilon = _EPSILON.get(self.kind, 0.0) if self.epsilon is None else self.epsilon
        dtype = None if self.moment_dtype == "float32" else self.moment_dtype  # None: the dtype of the weights
        if self.kind == "adafactor":
            mean = optax.ema(beta1, debias=False, accumulator_dtype=dtype) if beta1 else optax.identity()
            return optax.chain(scale_by_factored_rms(beta2), optax.stateless(clip_rms), mean)
        if self.kind == "lion":
            return optax.scale_by_lion(beta1, beta2, mu_dtype=dtype)
        if self.kind == "muon":
            return muon_or_adam(beta1, beta2, epsilon, dtype)
        return optax.scale_by_adam(beta1, beta2, epsilon, mu_dtype=dtype)

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
        return map_named_parameters(lambda name, leaf: leaf.replace("frozen" if name in frozen else "trained"), model)


def _decided(kind: str) -> dict[str, float | None]:
    """What a kind takes for None, by the names of the settings."""
    beta1, beta2 = _BETAS.get(kind, (None, None))
    return {"beta1": beta1, "beta2": beta2, "epsilon": _EPSILON.get(kind)}


def decays(model: nnx.Module) -> nnx.Module:
    """The model with True in place of each weight that is declared to decay, and False elsewhere.

    Of a weight that was not declared with `layers.parameter`, such as one of Flax's own layers, a matrix decays.
    """

    def decay(parameter: Any) -> Any:
        declared = getattr(parameter, "decay", None)
        return parameter.replace(parameter.ndim > 1 if declared is None else declared)

    return map_weights(decay, model)


def _scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Updates of lower layers times powers of a factor: for fine-tuning (Howard and Ruder 2018, section 3.2)."""

    def scale(updates: Any, parameters: Any = None) -> Any:
        depth = max((leaf.shape[0] for leaf in named_parameters(updates).values() if is_stacked(leaf)), default=0)

        def factor(name: str, leaf: Any) -> Any:
            if is_stacked(leaf):
                powers = decay ** jnp.arange(leaf.shape[0] - 1, -1, -1, dtype=jnp.float32)
                return leaf.replace(leaf[...] * powers.reshape(-1, *[1] * (leaf.ndim - 1)))
            return leaf.replace(leaf[...] * decay**depth) if "embedding" in name else leaf

        return map_named_parameters(factor, updates)

    return optax.stateless(scale)
