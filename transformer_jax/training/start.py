"""Starting a run from the weights of a checkpoint: of Hugging Face transformers, or of another run."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.data import ProcessorConfig, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained
from transformer_jax.interop.special_tokens import tokenizer_config
from transformer_jax.layers import is_parameter, named_parameters
from transformer_jax.models import ModelConfig
from transformer_jax.parallel import Strategy
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.workdir import Workdir

SHOWN = 6  # names in a list


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    name: str
    model: Any
    config: ModelConfig
    processor_config: Any
    processor: Any
    """None where the checkpoint has none."""


def load_start(name: str, strategy: Strategy) -> Start:
    """The checkpoint of this name, in shards: the folder of a run, or what `from_pretrained` takes."""
    workdir = Workdir(Path(name))
    if workdir.is_run():
        # Only these two: the run may have data and a task of somebody's own, which are not needed.
        config = workdir.setting(ModelConfig, "model")
        processor_config = workdir.setting(ProcessorConfig | None, "processor")
        checkpoints = Checkpoints(workdir.checkpoints, read_only=True)
        try:
            like = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
            model = checkpoints.restore_model(like, shardings=strategy.shardings(like))
        finally:
            checkpoints.close()
        processor = workdir.load_processor(processor_config)
        return Start(name, model, config, processor_config, processor)
    with strategy.context():
        found = from_pretrained(name, sharding=strategy.mesh)
    if found.tokenizer is None:
        return Start(name, found.model, found.config, None, None)
    special = tokenizer_config(found.tokenizer, found)
    return Start(name, found.model, found.config, special, found.tokenizer.with_config(special))


def started_model(start: Start, model: ModelConfig | None) -> ModelConfig:
    """The config of the checkpoint, with those settings of another that change none of its weights."""
    if model is None:
        return start.config
    if type(model) is not type(start.config):
        warnings.warn(
            f"the model is the {type(start.config).__name__} of {start.name}; the settings of {type(model).__name__} "
            "are not used",
            stacklevel=2,
        )
        return start.config
    return replace(start.config, **{name: getattr(model, name) for name in model.adjustable})


def started_processor(start: Start, config: Any, tags: Sequence[str] = ()) -> tuple[Any, Any]:
    """The processor's config and the processor: of the checkpoint, unless the config has none or names another.

    Args:
        start: the checkpoint.
        config: of the processor that is asked for; a tokenizer is another only if its path is given.
        tags: of the data.
    """
    if config is None:
        return None, None
    if isinstance(config, TokenizerConfig) and config.path is not None:
        return config, Tokenizer.load(config.path, config, tags=tags)
    if start.processor is None:
        raise UserError(
            f"{start.name} has no tokenizer that can be read; give one with --processor.path TOKENIZER.JSON"
        )
    return start.processor_config, start.processor


def transfer_weights(source: Any, model: Any, name: str = "the checkpoint") -> tuple[Any, str]:
    """A model with the weights of another where that has them, and what became of every weight, for people.

    A weight that the other lacks, or has for other labels, keeps its initial value. Any other that does not fit is an
    error.

    Args:
        source: the model to take weights from.
        model: the model to put them into, such as one with another head.
        name: of the source, for errors and for people.
    """
    theirs, ours = named_parameters(source), named_parameters(model)
    has_other_labels = _label_names(source) != _label_names(model)
    initialized = [
        path
        for path, weight in ours.items()
        if path not in theirs or (has_other_labels and "labels" in getattr(weight, "axes", ()))
    ]
    for path, weight in ours.items():
        if path not in initialized and theirs[path].shape != weight.shape:
            raise UserError(
                f"{name} has {path} of shape {theirs[path].shape}, and the model needs {weight.shape}; "
                "leave the sizes of the model to the checkpoint"
            )
    taken = {path: theirs[path] for path in ours if path not in initialized}
    # Copies: a step that is given the model, and donates it, must not delete the source.
    merged = [
        weight.replace(jnp.array(taken[path].get_value(), weight.dtype)) if path in taken else weight
        for path, weight in ours.items()
    ]
    model = jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_parameter), merged)
    report = f"started from {name}: {len(taken)} of {len(ours)} weights"
    if initialized:
        report += f"; initialized: {_listed(initialized)}"
    if unused := [path for path in theirs if path not in taken]:
        report += f"; not used of the checkpoint: {_listed(unused)}"
    return model, report


def _label_names(model: Any) -> tuple[str, ...]:
    """The names of a model's labels, which are their numbers if they have none."""
    config = getattr(model, "config", None)
    num_labels = getattr(config, "num_labels", None) or 0
    return getattr(config, "label_names", ()) or tuple(map(str, range(num_labels)))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
