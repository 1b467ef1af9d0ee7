"""Checkpoints of Hugging Face transformers in and out."""

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.bert import BERT
from transformer_jax.interop.distilbert import DISTILBERT
from transformer_jax.interop.family import Family
from transformer_jax.interop.gpt import GPT2, LLAMA
from transformer_jax.interop.hub import find_folder
from transformer_jax.interop.marian import MARIAN
from transformer_jax.interop.roberta import ROBERTA
from transformer_jax.interop.t5 import T5
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.tensors import open_tensors, write_tensors
from transformer_jax.interop.tokenizers import load_tokenizer, save_tokenizer
from transformer_jax.interop.weights import load_weights, weights_to_write
from transformer_jax.interop.xlnet import XLNET
from transformer_jax.models import BertConfig, GPTConfig, ModelConfig, T5Config, TransformerConfig, make_model

FAMILIES = {family.model_type: family for family in (BERT, ROBERTA, DISTILBERT, GPT2, LLAMA, T5, XLNET, MARIAN)}

SIGNS = {
    "bert": r"^(bert\.)?embeddings\.",
    "roberta": r"^roberta\.embeddings",
    "distilbert": r"^distilbert\.embeddings",
    "gpt2": r"\bwte\.weight$",
    "llama": r"mlp\.gate_proj\.weight$",
    "t5": r"SelfAttention\.q\.weight$",
    "xlnet": r"\bmask_emb$",
    "marian": r"^final_logits_bias$",
}
"""A tensor that only checkpoints of a family have."""


@dataclass(frozen=True)
class Pretrained:
    """A model with the weights of a checkpoint, its config, and its tokenizer where there is one beside it."""

    model: Any
    config: ModelConfig
    tokenizer: Tokenizer | None


def from_pretrained(path_or_name: str | Path) -> Pretrained:
    """A checkpoint of transformers: a folder, or the name of a repository on the Hugging Face hub.

    BERT, RoBERTa, DistilBERT, GPT-2, Llama, T5 (both versions), XLNet and Marian, as safetensors or .bin, in one file
    or several. Every tensor must have its place: one that is missing, left over or misshapen is an error that names it.
    A name is looked up on the hub only where there is no such folder, and needs the extra [hub].
    """
    folder = find_folder(path_or_name)
    fields = _read_json(folder / "config.json")
    said = fields.get("model_type") or None
    found = open_tensors(folder) if said in (None, *FAMILIES) else {}
    family = FAMILIES.get(str(said or _shown_by(found)))
    if family is None:
        raise UserError(
            f"{folder / 'config.json'} has model_type={said!r}; what can be loaded is {', '.join(FAMILIES)}"
        )
    tensors = _renamed(found, family)
    config = family.read_config({**family.defaults, **fields}, tensors)
    model = load_weights(lambda: make_model(config, rngs=nnx.Rngs(0)), family.names(config), tensors, folder)
    return Pretrained(model, config, _tokenizer(folder))


def save_pretrained(
    model: Any, folder: str | Path, *, tokenizer: Tokenizer | None = None, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as transformers reads it: config.json, safetensors, and tokenizer.json if there is a tokenizer.

    Nothing is written for a model that no architecture of transformers can hold; the error says why.
    """
    family, folder = _family_of(model.config), Path(folder)
    fields = {"model_type": family.model_type, **family.write_config(model.config), "dtype": "float32"}
    # A folder that holds a checkpoint is refused here, before anything else of it is written over.
    write_tensors(folder, weights_to_write(model, family.names(model.config)), shard_bytes=shard_bytes)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    partial_file = folder / "config.json.partial"
    partial_file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial_file.replace(folder / "config.json")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer beside a checkpoint. One that cannot be used is no reason to do without the model."""
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
        return MARIAN
    return T5 if isinstance(config, T5Config) else XLNET


def _shown_by(tensors: Mapping[str, Tensor]) -> str | None:
    """The family that the names of the tensors show, where an old config does not say it."""
    return next(
        (model_type for model_type, sign in SIGNS.items() if any(re.search(sign, name) for name in tensors)), None
    )


def _renamed(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    renamed = {family.rename(name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in renamed.items() if name is not None}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent} has no config.json; name the folder of a checkpoint of transformers")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds no JSON object")
    return fields
