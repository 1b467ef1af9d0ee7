"""`python -m transformer_jax convert IN OUT`: a checkpoint of Hugging Face transformers to a run, or a run to one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from transformer_jax.data import Files, Text, Tokenizer, TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop import from_pretrained, save_pretrained
from transformer_jax.models import BertConfig, GPTConfig, ModelConfig, XLNetConfig
from transformer_jax.tasks import CausalLMConfig, MaskedLMConfig, PermutationLMConfig, TaskConfig, TranslationConfig
from transformer_jax.training import Config, OptimizerConfig, Run, TrainState
from transformer_jax.training.run import write_run


@dataclass(frozen=True)
class Convert:
    """Make a run of a checkpoint of Hugging Face transformers, for generate, attention and evaluate; or the reverse.

    Which of the two it is, IN says: a run is a folder that train.py made.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """A folder with a checkpoint of transformers, the name of one on the hub, or the folder of a run."""
    out: Annotated[Path, tyro.conf.Positional]
    """The folder to make."""
    step: int | None = None
    """The checkpoint of the run to use; the newest by default."""
    tokenizer: Path | None = None
    """A tokenizer.json for a checkpoint that has none beside it."""

    def run(self) -> None:
        """Convert, and print what was made."""
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(f"{self.out} exists already; give another folder")
        if _is_run(Path(self.source)):
            run = Run.open(Path(self.source))
            model, step = run.restored_model(self.step)
            save_pretrained(model, self.out, tokenizer=run.task.tokenizer)
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
        pad, begin, end = tokenizer.tokens([tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id])
        task = _task(found.config)
        config = Config(
            model=found.config,
            task=task,
            data=Text() if task.fields == ("text",) else Files(),
            tokenizer=TokenizerConfig(pad=pad, begin=begin, end=end),
            optimizer=OptimizerConfig(schedule="linear", total_steps=1),
            steps=1,
        )
        task.build(tokenizer, found.config, config.batching)  # type: ignore[arg-type]
        optimizer = jax.eval_shape(config.optimizer.build(found.config.d_model).init, found.model)
        # Zeros of NumPy take no memory before they are written to.
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), optimizer)
        state = TrainState(np.int32(0), found.model, moments, jax.random.key(0))  # type: ignore[arg-type]
        write_run(self.out, config, tokenizer, state)


def _is_run(path: Path) -> bool:
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8")).get("type") == Config.__name__
    except (OSError, ValueError, AttributeError):
        return False


def _task(model: ModelConfig) -> TaskConfig:
    """What a model is for, so far as it can be used without more training."""
    if isinstance(model, GPTConfig):
        return CausalLMConfig()
    if isinstance(model, BertConfig):
        return MaskedLMConfig(next_sentence="next_sentence" in model.heads)
    return PermutationLMConfig() if isinstance(model, XLNetConfig) else TranslationConfig()
