"""The special ids of generation, as config.json and generation_config.json have them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.fields import Json, Kind, check_field, read_json
from transformer_jax.models import T5Config, TransformerConfig

NAMES = {
    "begin": "bos_token_id",
    "end": "eos_token_id",
    "pad": "pad_token_id",
    "decoder_start": "decoder_start_token_id",
    "forced_begin": "forced_bos_token_id",
    "forced_end": "forced_eos_token_id",
}
"""What transformers calls each of them."""
OF_DECODERS = ("decoder_start", "forced_begin", "forced_end")
"""Those that only an encoder-decoder has, for its targets."""
SEVERAL = ("end", "forced_end")
"""Those of which a model may have several."""

FILE = "generation_config.json"


@dataclass(frozen=True)
class SpecialIds:
    """The ids that generation begins, ends and pads with. None or () means that a model has no such id."""

    begin: int | None = None
    """What a text begins with."""
    end: tuple[int, ...] = ()
    """What a text ends with: any of these."""
    pad: int | None = None
    decoder_start: int | None = None
    """What the target of an encoder-decoder begins with."""
    forced_begin: int | None = None
    """What every target continues with after its start, such as the id of its language."""
    forced_end: tuple[int, ...] = ()
    """What a text ends with when it reaches the length limit."""

    def check(self, config: Any) -> None:
        """Raise on an id that is outside the vocabulary, and on padding that is not the model's."""
        num_ids = config.vocab_size or 0
        for name in NAMES:
            for id in _several(getattr(self, name)):
                if not _is_id(id) or not 0 <= id < num_ids:
                    known = f"the vocabulary of {num_ids} (ids 0 to {num_ids - 1})"
                    raise UserError(f"special_ids.{name}={id!r} is outside {known}; give the id of a token in it")
        pad_id = getattr(config, "pad_id", self.pad)
        if self.pad != pad_id:
            raise UserError(f"special_ids.pad={self.pad}, but the model was made with pad_id={pad_id}; give that")


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ONE_ID = Kind("an id, or null", lambda value: value is None or _is_id(value))
IDS = Kind("an id, a list of ids, or null", lambda value: all(map(_is_id, _several(value))), _several)


def read_special_ids(folder: Path, json: Json, defaults: Json, config: Any) -> SpecialIds:
    """The special ids of a checkpoint: from generation_config.json, or else config.json, or else the defaults.

    An id outside the vocabulary is ignored, since no text can contain it: transformers writes the ids of a large
    vocabulary into the configs of models with a small one.
    """
    found: dict[str, Any] = {}
    generation = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    generation = {name: value for name, value in generation.items() if value is not None}
    for where, fields in (("config.json", {**defaults, **json}), (FILE, generation)):
        for name, theirs in NAMES.items():
            if theirs in fields:
                found[name] = check_field(theirs, fields[theirs], IDS if name in SEVERAL else ONE_ID, where)
    known = {
        name: tuple(id for id in _several(value) if 0 <= id < (config.vocab_size or 0)) for name, value in found.items()
    }
    special = SpecialIds(**{name: ids if name in SEVERAL else next(iter(ids), None) for name, ids in known.items()})  # type: ignore[arg-type]
    return _completed(special, config)


def special_ids_of(config: Any, tokenizer: Tokenizer | None) -> SpecialIds:
    """The special ids of a model that was trained here: its tokenizer's, or without one, those in its config."""
    if tokenizer is None:
        return _completed(SpecialIds(), config)
    start = tokenizer.begin_id if isinstance(config, TransformerConfig) else None
    special = SpecialIds(tokenizer.begin_id, (tokenizer.end_id,), tokenizer.pad_id, start)
    return _completed(special, config)


def _completed(special: SpecialIds, config: Any) -> SpecialIds:
    """With the model's own padding id; targets start with it too, as T5's do, where no other start is known."""
    special = replace(special, pad=getattr(config, "pad_id", special.pad))
    if special.decoder_start is None and isinstance(config, T5Config | TransformerConfig):
        return replace(special, decoder_start=special.pad)
    return special


def config_fields(config: Any, special: SpecialIds) -> dict[str, Any]:
    """The special ids as fields of config.json. One that is missing is null, or transformers would use its default."""
    decoder = isinstance(config, T5Config | TransformerConfig)
    values = {name: getattr(special, name) for name in NAMES if decoder or name not in OF_DECODERS}
    return {NAMES[name]: _as_json(value) for name, value in values.items()}


def generation_fields(config: Any, special: SpecialIds) -> dict[str, Any] | None:
    """The generation_config.json of a model; None for a model that does not generate."""
    if not isinstance(config, TransformerConfig) and not getattr(config, "lm_head", False):
        return None
    fields = {name: value for name, value in config_fields(config, special).items() if value is not None}
    if isinstance(config, T5Config | TransformerConfig):  # or else transformers stops after 20 tokens
        fields["max_length"] = config.max_length
    return fields


def _as_json(value: int | tuple[int, ...] | None) -> int | list[int] | None:
    if isinstance(value, tuple):
        return list(value) if len(value) > 1 else next(iter(value), None)
    return value
