"""Checkpoints of Hugging Face transformers in and out."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from transformer_jax.atomic import atomic
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.bert import BERT
from transformer_jax.interop.distilbert import DISTILBERT
from transformer_jax.interop.family import Family
from transformer_jax.interop.fields import LARGEST_SIZE, read_json, short
from transformer_jax.interop.gpt import GPT2
from transformer_jax.interop.hub import find_folder
from transformer_jax.interop.llama import LLAMA
from transformer_jax.interop.marian import MARIAN
from transformer_jax.interop.pegasus import PEGASUS
from transformer_jax.interop.roberta import ROBERTA
from transformer_jax.interop.special_ids import (
    FILE,
    SpecialIds,
    config_fields,
    generation_fields,
    read_special_ids,
    special_ids_of,
)
from transformer_jax.interop.t5 import T5
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.tensors import Writable, open_tensors, write_tensors
from transformer_jax.interop.tokenizers import check_vocabulary, load_tokenizer, save_tokenizer
from transformer_jax.interop.weights import FLOAT32, load_weights, renamed, weights_to_write
from transformer_jax.interop.xlnet import XLNET
from transformer_jax.models import BertConfig, GPTConfig, ModelConfig, T5Config, TransformerConfig, XLNetConfig

FAMILIES = {
    family.model_type: family for family in (BERT, ROBERTA, DISTILBERT, GPT2, LLAMA, T5, XLNET, PEGASUS, MARIAN)
}

DTYPES = (FLOAT32, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
"""What weights can be loaded in."""

SIGNATURES = {
    "bert": r"^(bert\.)?embeddings\.",
    "roberta": r"^roberta\.embeddings",
    "distilbert": r"^distilbert\.embeddings",
    "gpt2": r"\bwte\.weight$",
    "llama": r"mlp\.gate_proj\.weight$",
    "t5": r"SelfAttention\.q\.weight$",
    "xlnet": r"\bmask_emb$",
    "pegasus": r"^(model\.)?decoder\.layer_norm\.weight$",
    "marian": r"^final_logits_bias$",
}
"""A pattern of the name of a tensor that only checkpoints of a family have."""


@dataclass(frozen=True)
class Pretrained:
    """A model with the weights of a checkpoint, its config, its tokenizer if it has one, and its special ids.

    It is called like its model, and compiled: `bert(ids)` is `jax.jit(Bert.__call__)(bert.model, ids)`.
    """

    model: Any
    config: ModelConfig
    tokenizer: Tokenizer | None
    special_ids: SpecialIds
    """The ids that generation begins, ends and pads with."""

    @property
    def num_parameters(self) -> int:
        """The number of values in all weights; a table that is tied counts once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.model))

    def __call__(self, *arrays: Any, **named_arrays: Any) -> Any:
        """Call the model, compiled once for each shape of the inputs.

        Positional and keyword arguments are those of the model's `__call__`, and must be arrays or None:
        `bert(ids, valid=ids != 0)`, `t5(source, target)`. A function of your own is compiled the same way:
        `jax.jit(function)(bert.model, ids)`.
        """
        return self.apply("__call__", *arrays, **named_arrays)

    def apply(self, method: str, *arrays: Any, **named_arrays: Any) -> Any:
        """Call another method of the model, compiled, such as a head: `bert.apply("masked_lm", bert(ids))`."""
        return _compiled(getattr(type(self.model), method))(self.model, *arrays, **named_arrays)


@cache
def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(method)


def from_pretrained(
    path_or_name: str | Path, *, dtype: DTypeLike | None = None, sharding: Sharding | Mesh | None = None
) -> Pretrained:
    """Load a checkpoint of transformers from a folder, or from a repository on the Hugging Face hub.

    It may be of BERT, RoBERTa, DistilBERT, GPT-2, Llama, T5 (both versions), XLNet, Marian or Pegasus, as safetensors
    or .bin, in one file or several. Every tensor must be accounted for: one that is missing, left over or misshapen is
    an error that names it. So is a field of config.json that has the wrong type, or that our models would not honour.

    Weights are read, cast and put on their devices one at a time, so that the host never holds all of them and no
    device holds more than its own shards.

    Args:
        path_or_name: The folder. A name is looked up on the hub only where there is no such folder, and needs the extra
            [hub].
        dtype: What the weights are stored in on the devices: float32 (the default), bfloat16 or float16. What the model
            computes in is `config.dtype`, and does not depend on it.
        sharding: How the weights are laid out. None puts them on the default device. A `jax.sharding.Sharding` holds
            for every weight: `NamedSharding(mesh, PartitionSpec())` replicates them. A `jax.sharding.Mesh` lays out
            each weight by its declared logical axes (`parallel.parameter_sharding`).
    """
    stored = _weights_dtype(dtype)
    if sharding is not None and not isinstance(sharding, Sharding | Mesh):
        raise TypeError(f"sharding={sharding!r} is not a jax.sharding.Sharding, a jax.sharding.Mesh or None")
    folder = find_folder(path_or_name)
    fields = _read_config_json(folder)
    model_type = fields.get("model_type") or None
    known = model_type is None or (isinstance(model_type, str) and model_type in FAMILIES)
    found = open_tensors(folder) if known else {}
    family = FAMILIES.get(str(model_type or _recognized(found)))
    if family is None:
        raise UserError(
            f"{folder / 'config.json'} has model_type={short(model_type)}; what can be loaded is {', '.join(FAMILIES)}"
        )
    tensors = renamed(found, family.rename)
    config = family.read_config(family.read_fields(fields), tensors)
    special_ids = read_special_ids(folder, fields, family.special_ids, config)
    _check_padding(config)
    tokenizer = _tokenizer(folder)
    if tokenizer is not None and config.vocab_size is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    model = load_weights(
        lambda: config.build(nnx.Rngs(0)),
        family.names(config),
        tensors,
        folder,
        dtype=stored,
        sharding=sharding,
    )
    return Pretrained(model, config, tokenizer, special_ids)


def save_pretrained(
    model: Any,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    special_ids: SpecialIds | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as transformers reads it: config.json, safetensors, and tokenizer.json if there is a tokenizer.

    A model that generates also gets a generation_config.json. For a model that no architecture of transformers can
    hold, nothing is written, and the error says why.

    Args:
        model: Any model of this package.
        folder: It is created if it does not exist, and must not hold a checkpoint yet.
        tokenizer: The tokenizer that the model was trained with.
        special_ids: The ids that generation begins, ends and pads with; by default those of the tokenizer.
        shard_bytes: The most bytes of tensors in one file.
    """
    family, folder = _family_of(model.config), Path(folder)
    special_ids = special_ids or special_ids_of(model.config, tokenizer)
    special_ids.check(model.config)
    fields = {"model_type": family.model_type, **family.write_config(model.config), "dtype": "float32"}
    fields |= config_fields(model.config, special_ids)
    model = family.fit(model)
    names = family.names(model.config)
    tensors = weights_to_write(model, names)
    for name, constant in names.constants.items() if family.save_constants else ():
        tensors[name] = Writable(constant().shape, FLOAT32, constant)
    # A folder that holds a checkpoint is refused here, before anything else in it is overwritten.
    write_tensors(folder, tensors, shard_bytes=shard_bytes)
    if tokenizer is not None:
        save_tokenizer(
            tokenizer,
            folder,
            model_type=family.model_type,
            vocab_size=model.config.vocab_size,
            max_length=model.config.max_length,
        )
    generation = generation_fields(model.config, special_ids)
    if generation is not None:
        _write_json(folder / FILE, generation)
    _write_json(folder / "config.json", fields)


def _weights_dtype(dtype: DTypeLike | None) -> np.dtype:
    try:
        found = FLOAT32 if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be that of weights; give one of {', '.join(map(str, DTYPES))}")
    return found


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    try:
        with atomic(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer beside a checkpoint. One that cannot be read is a warning: the model is usable without it."""
    try:
        return load_tokenizer(folder)
    except UserError as error:
        warnings.warn(f"the tokenizer in {folder} is left out: {error}", stacklevel=3)
        return None


def _family_of(config: ModelConfig) -> Family:
    if isinstance(config, BertConfig):
        return ROBERTA if config.position_start else BERT if config.num_types else DISTILBERT
    if isinstance(config, GPTConfig):
        return LLAMA if config.positions == "rotary" else GPT2
    if isinstance(config, TransformerConfig):
        return PEGASUS if config.norm == "pre" else MARIAN
    if isinstance(config, T5Config | XLNetConfig):
        return T5 if isinstance(config, T5Config) else XLNET
    raise UserError(
        f"a model of {type(config).__name__} cannot be saved as a checkpoint of transformers, which has "
        f"{', '.join(FAMILIES)}"
    )


def _recognized(tensors: Mapping[str, Tensor]) -> str | None:
    """The `model_type` by the names of the tensors, for an old config.json without one."""
    return next(
        (model_type for model_type, pattern in SIGNATURES.items() if any(re.search(pattern, name) for name in tensors)),
        None,
    )


def _read_config_json(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; name the folder of a checkpoint of transformers")
    return read_json(folder / "config.json")


def _check_padding(config: Any) -> None:
    pad_id = getattr(config, "pad_id", None) or 0
    num_ids = min(config.vocab_size or 0, getattr(config, "source_vocab_size", None) or LARGEST_SIZE)
    if pad_id >= num_ids:
        raise UserError(f"config.json: pad_token_id={pad_id} is outside the vocabulary of {num_ids}")
