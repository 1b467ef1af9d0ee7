"""The special tokens of a run that starts from a checkpoint."""

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.tokenizer_config import TokenizerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.pretrained import Pretrained
from transformer_jax.interop.special_ids import SpecialIds
from transformer_jax.models import GPTConfig, ModelConfig, T5Config, TransformerConfig


def tokenizer_config(tokenizer: Tokenizer, pretrained: Pretrained) -> TokenizerConfig:
    """Name the padding, begin and end tokens of a run: by the checkpoint's ids, or else as the tokenizer has them.

    Args:
        tokenizer: The tokenizer that the run will use, which may be another than `pretrained.tokenizer`.
        pretrained: The checkpoint that the run starts from.

    Raises:
        UserError: If an id of the checkpoint is not that of a token, or a run would not begin its targets as the
            checkpoint says.
    """
    model, special = pretrained.config, pretrained.special_ids
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
    tokens = tokenizer.vocabulary()
    if id >= len(tokens) or not tokens[id]:
        raise UserError(
            f"the checkpoint's {role} id is {id}, but its tokenizer has no token with that id; give the tokenizer that "
            "the model was trained with: --processor.path TOKENIZER.JSON"
        )
    return tokens[id]


def _check_targets(model: ModelConfig, special: SpecialIds) -> None:
    """Raise if a run would begin the targets of an encoder-decoder with other tokens than the checkpoint says."""
    if isinstance(model, T5Config) and special.decoder_start != special.pad:
        raise UserError(
            f"decoder_start_token_id={special.decoder_start}, but a T5 here begins its targets with its padding, "
            f"pad_token_id={special.pad}; load it with from_pretrained"
        )
    if special.forced_begin is not None:
        raise UserError(
            f"forced_bos_token_id={special.forced_begin} would not be honoured by a run; load it with from_pretrained"
        )
