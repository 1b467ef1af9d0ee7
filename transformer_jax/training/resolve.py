"""What a config leaves open, decided by the checkpoint, the processor, the training set and the machine."""

from dataclasses import fields, replace
from typing import Any

import jax

from transformer_jax.errors import UserError
from transformer_jax.training.config import Config, check_fields, check_model
from transformer_jax.training.examples import records_of
from transformer_jax.training.start import Start, started_model, started_processor


def resolve_again(config: Config, before: Config) -> Config:
    """The config of a run that goes on: what was decided when it began stays as it is."""
    optimizer = replace(config.optimizer, total_steps=before.optimizer.total_steps)
    return replace(config, model=before.model, processor=before.processor, optimizer=optimizer)


def resolve_new(
    config: Config, start: Start | None, processor: Any = None, before: Config | None = None
) -> tuple[Config, Any]:
    """The config of a new run with nothing left open, and its processor.

    Args:
        config: what is asked for.
        start: the checkpoint to start from.
        processor: the one of the same run that was stopped before its first checkpoint.
        before: the config of that.
    """
    check_fields(config.task, config.data)
    model: Any
    if start is not None:
        model = started_model(start, config.model)
        check_model(config.task, model)
        processor_config, processor = started_processor(start, config.processor, config.data.tags())
    else:
        model, processor_config = config.model, config.processor
        processor = learn_processor(config) if processor is None else processor
    model = config.task.adapt(model, records_of(config, "train"))
    model = _with_processor(model, processor, config.task.num_extra_ids(processor), started=start is not None)
    if getattr(model, "dtype", None) == "auto":
        here = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model = replace(model, dtype=here if before is None else before.model.dtype)  # type: ignore[union-attr]
    optimizer = config.optimizer
    if optimizer.total_steps is None:
        optimizer = replace(optimizer, total_steps=before.optimizer.total_steps if before else config.steps)
    return replace(config, model=model, processor=processor_config, optimizer=optimizer), processor


def learn_processor(config: Config) -> Any:
    """The processor of a new run, learned from its training set; None where the config has none."""
    if config.processor is None:
        return None
    records = records_of(config, "train")
    if not len(records):
        raise UserError("the train split is empty")
    return config.processor.learn(
        records, (*config.task.text_fields, *config.task.word_fields), tags=config.data.tags()
    )


def _with_processor(model: Any, processor: Any, num_extra_ids: int, *, started: bool) -> Any:
    """The config of a model with what comes from the tokenizer, if there is one: vocabulary size and padding id."""
    known = {field.name for field in fields(model)}
    if not hasattr(processor, "vocab_size") or "vocab_size" not in known:
        return model
    num_ids = processor.vocab_size + num_extra_ids
    if model.vocab_size is None:
        model = replace(model, vocab_size=num_ids)
    if model.vocab_size < num_ids:
        advice = "give the tokenizer of the checkpoint" if started else "set it to None to have as many"
        raise UserError(
            f"the tokenizer and the task need {num_ids} ids but model.vocab_size is {model.vocab_size}; {advice}"
        )
    if "pad_id" in known:
        if model.pad_id is None:
            model = replace(model, pad_id=processor.pad_id)
        if model.pad_id != processor.pad_id:
            raise UserError(f"the tokenizer pads with id {processor.pad_id} but model.pad_id is {model.pad_id}")
    return model
