"""`transformer-jax convert IN OUT`: a checkpoint of Hugging Face transformers to a run, or a run to one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.commands.runs import open_run
from transformer_jax.data import Files, Source, Text, Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained, save_pretrained
from transformer_jax.interop.special_tokens import tokenizer_config
from transformer_jax.interop.tokenizers import check_vocabulary
from transformer_jax.models import BertConfig, GPTConfig, ModelConfig, XLNetConfig
from transformer_jax.tasks import (
    CausalLMConfig,
    ClassificationConfig,
    MaskedLMConfig,
    PermutationLMConfig,
    QuestionAnsweringConfig,
    TaggingConfig,
    TaskConfig,
    TranslationConfig,
)
from transformer_jax.training import Config, OptimizerConfig
from transformer_jax.training.run import write_run
from transformer_jax.training.workdir import Workdir


@dataclass(frozen=True)
class Convert:
    """Make a run of a checkpoint of Hugging Face transformers, or a checkpoint of a run.

    Which of the two it is, IN says: a run is a folder that a training made.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Folder with a checkpoint of transformers, name of one on the hub, or folder of a run."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to make."""
    step: int | None = None
    """Step of the run's checkpoint to use; None takes the newest."""
    pairs: bool = False
    """Whether a classifier reads pairs of texts, and not single ones."""
    tokenizer: Path | None = None
    """Path of a tokenizer.json for a checkpoint that has none beside it."""
    config: Path | None = None
    """Python file with the models, sources and tasks of a run that are not part of this package; it is executed."""

    def run(self) -> None:
        """Convert, and print what was made."""
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(f"{self.out} exists already; give another folder")
        if Workdir(Path(self.source)).is_run():
            run = open_run(Path(self.source), self.config)
            model, step = run.restored_model(self.step)
            tokenizer = run.processor if isinstance(run.processor, Tokenizer) else None
            save_pretrained(model, self.out, tokenizer=tokenizer)
            print(f"{self.out} is step {step} of {self.source} as transformers reads it")
        else:
            self._make_run()
            print(f"{self.out} is a run with the weights of {self.source}")

    def _make_run(self) -> None:
        found = from_pretrained(self.source)
        tokenizer = found.tokenizer if self.tokenizer is None else Tokenizer.load(self.tokenizer)
        if tokenizer is None:
            raise UserError(
                f"{self.source} has no tokenizer that can be read; give one with --tokenizer TOKENIZER.JSON"
            )
        check_vocabulary(tokenizer, found.model.config.vocab_size)
        task = _task(found.config, pairs=self.pairs)
        model = _with_label_names(found.config)
        config = Config(
            model=model,
            task=task,
            data=_data(task),
            processor=tokenizer_config(tokenizer, found),
            optimizer=OptimizerConfig(schedule="linear", total_steps=1),
            steps=1,
        )
        task.build(tokenizer, model, config.batching)
        write_run(self.out, config, tokenizer, found.model)


def _task(model: ModelConfig, *, pairs: bool) -> TaskConfig:
    """What a model is for, so far as it can be used without more training."""
    if isinstance(model, XLNetConfig):
        return PermutationLMConfig()
    if not isinstance(model, BertConfig | GPTConfig):
        return TranslationConfig()
    if "classifier" in model.heads:
        return ClassificationConfig(pairs=pairs)
    if isinstance(model, GPTConfig) and "tagger" in model.heads:
        raise UserError("a GPT that tags words can be loaded with from_pretrained, but no task of a run is for it")
    if isinstance(model, GPTConfig):
        return CausalLMConfig()
    if "tagger" in model.heads:
        return TaggingConfig()
    return (
        QuestionAnsweringConfig()
        if "span" in model.heads
        else MaskedLMConfig(next_sentence="next_sentence" in model.heads)
    )


def _with_label_names(model: ModelConfig) -> ModelConfig:
    """Labels without names are called by their numbers, as those of other files are."""
    num_labels = getattr(model, "num_labels", None)
    if num_labels is None or model.label_names:  # type: ignore[attr-defined]
        return model
    return replace(model, label_names=tuple(map(str, range(num_labels))))  # type: ignore[call-arg]


def _data(task: TaskConfig) -> Source:
    """Where the data of a converted run come from, once `evaluate` is given their files."""
    if task.fields == ("text",):
        return Text()
    return Files(columns=dict.fromkeys(task.fields, ""))
