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
from transformer_jax.interop import Pretrained, SpecialIds, from_pretrained, save_pretrained
from transformer_jax.interop.tokenizers import check_vocabulary
from transformer_jax.models import BertConfig, GPTConfig, ModelConfig, T5Config, TransformerConfig, XLNetConfig
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
        check_vocabulary(tokenizer, found.model.config.vocab_size)
        task = _task(found.config)
        config = Config(
            model=found.config,
            task=task,
            data=Text() if task.fields == ("text",) else Files(),
            tokenizer=_tokenizer_config(tokenizer, found),
            optimizer=OptimizerConfig(schedule="linear", total_steps=1),
            steps=1,
        )
        task.build(tokenizer, found.config, config.batching)  # type: ignore[arg-type]
        optimizer = jax.eval_shape(config.optimizer.build(found.config.d_model).init, found.model)
        # Zeros of NumPy take no memory before they are written to.
        moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), optimizer)
        state = TrainState(np.int32(0), found.model, moments, jax.random.key(0))  # type: ignore[arg-type]
        write_run(self.out, config, tokenizer, state)


def _tokenizer_config(tokenizer: Tokenizer, found: Pretrained) -> TokenizerConfig:
    """The special tokens of a run: those whose ids the checkpoint says, or else those that the tokenizer has."""
    model, special = found.config, found.special_ids
    begin, end = tokenizer.begin_id, tokenizer.end_id
    if isinstance(model, GPTConfig):
        begin = begin if special.begin is None else special.begin
    elif special.decoder_start is not None:
        begin = special.decoder_start
        _check_targets(model, special)
    if isinstance(model, GPTConfig | T5Config | TransformerConfig) and end not in special.end:
        end = next(iter(special.end), end)
    pad = tokenizer.pad_id if special.pad is None else special.pad
    add_begin = tokenizer.begins_texts if tokenizer.add_begin is None else tokenizer.add_begin
    return TokenizerConfig(
        pad=_token(tokenizer, pad, "pad"),
        begin=_token(tokenizer, begin, "begin"),
        end=_token(tokenizer, end, "end"),
        add_begin=add_begin,
    )


def _token(tokenizer: Tokenizer, id: int, role: str) -> str:
    known = tokenizer.vocabulary()
    if id >= len(known) or not known[id]:
        raise UserError(
            f"the checkpoint's {role} id is {id}, which is no token of its tokenizer; give the right one with "
            "--tokenizer TOKENIZER.JSON"
        )
    return known[id]


def _check_targets(model: ModelConfig, special: SpecialIds) -> None:
    """Raise on what the targets of an encoder-decoder begin with, if a run would not begin them so."""
    if isinstance(model, T5Config) and special.decoder_start != special.pad:
        raise UserError(
            f"decoder_start_token_id={special.decoder_start}, but a T5 here begins its targets with its padding, "
            f"pad_token_id={special.pad}; load it with from_pretrained"
        )
    if special.forced_begin is not None:
        raise UserError(
            f"forced_bos_token_id={special.forced_begin} would not be honoured by a run; load it with from_pretrained"
        )


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
