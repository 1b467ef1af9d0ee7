"""Pegasus checkpoints: the encoder-decoder with its norms before the sub-layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformer_jax.interop.family import Family, norm
from transformer_jax.interop.fields import ID, Field, Json, require
from transformer_jax.interop.marian import ALIASES, FIELDS, FIXED, SIDES, names_of, read_config, rename, write_config
from transformer_jax.interop.permutation import with_halved_sinusoids
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names
from transformer_jax.models.transformer import TransformerConfig


def _names(config: TransformerConfig) -> Names:
    names = names_of(config)
    norms = [norm(f"{side}_norm", f"model.{side}.layer_norm") for side in SIDES]
    return replace(names, weights={**names.weights, **norms[0], **norms[1]})


def _read(json: Json, found: Mapping[str, Tensor]) -> TransformerConfig:
    require(json, {"tie_word_embeddings": True})
    return read_config(json, found, norm="pre", vocab_size=json["vocab_size"], tie_embeddings="all")


def _write(config: TransformerConfig) -> dict[str, Any]:
    fields = write_config("Pegasus", config, norm="pre", tie_embeddings="all")
    return fields | {"architectures": ["PegasusForConditionalGeneration"]}


PEGASUS = Family(
    "pegasus",
    FIELDS | {"pad_token_id": Field(ID, "pad_id", 0)},
    rename,
    _read,
    _write,
    _names,
    fixed=FIXED,
    aliases=ALIASES,
    special_ids={"decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1},
    fit=with_halved_sinusoids,
    save_constants=True,
)
