"""T5 checkpoints: the first version, v1.1 and what was trained from either."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interop.family import (
    Family,
    blocks,
    has_head,
    norm,
    our_fields,
    require_config,
    table,
    their_fields,
)
from transformer_jax.interop.fields import (
    FLAG,
    ID,
    LAYERS,
    MOST_LAYERS,
    POSITIVE,
    RATE,
    SIZE,
    Field,
    Json,
    choice,
    optional,
    require,
    whole_number,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.t5 import T5Config

ACTIVATIONS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gelu_new": ("gelu_tanh", False),
    "silu": ("silu", False),
    "gated-relu": ("relu", True),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}
"""What feed_forward_proj says of the feed-forward network: its activation, and whether it has a gate."""
FIELDS = {
    "vocab_size": Field(SIZE, "vocab_size"),
    "d_model": Field(SIZE, "d_model"),
    "num_heads": Field(SIZE, "num_heads"),
    "d_kv": Field(SIZE, "head_size"),
    "d_ff": Field(SIZE, "d_ff"),
    "num_layers": Field(LAYERS, "num_encoder_layers"),
    "num_decoder_layers": Field(optional(whole_number(0, MOST_LAYERS)), "num_decoder_layers", None),
    "dropout_rate": Field(RATE, "dropout_rate", 0.1),
    "layer_norm_epsilon": Field(POSITIVE, "norm_epsilon", 1e-6),
    "relative_attention_num_buckets": Field(SIZE, "num_buckets", 32),
    "relative_attention_max_distance": Field(SIZE, "max_distance", 128),
    "feed_forward_proj": Field(choice(ACTIVATIONS), default="relu"),
    "dense_act_fn": Field(optional(choice(("relu", "gelu", "gelu_new", "silu"))), default=None),
    "is_gated_act": Field(optional(FLAG), default=None),
    "pad_token_id": Field(ID, "pad_id", 0),
    "n_positions": Field(SIZE, "max_length", 512),
    "tie_word_embeddings": Field(FLAG, default=True),
    "scale_decoder_outputs": Field(optional(FLAG), default=None),
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
"""What the first checkpoints have: a table of distances from the target to the source, which mean nothing."""


def _names(config: T5Config) -> Names:
    weights = table("embedding", "shared")
    sides = [("encoder", 1), *([("decoder", 2)] if config.num_decoder_layers else [])]
    for side, last in sides:
        ours, theirs = f"{side}.layers.blocks", f"{side}.block.{{layer}}.layer"
        inward = {"feed_forward.input": "wi"}
        if config.gated:
            inward = {"feed_forward.gate": "wi_0", "feed_forward.input": "wi_1"}
        weights |= blocks(ours, f"{theirs}.{last}.DenseReluDense", inward | {"feed_forward.output": "wo"}, bias=False)
        weights |= norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.{last}.layer_norm", bias=False)
        weights |= _attention(f"{ours}.self_attention", f"{theirs}.0", "SelfAttention")
        table_name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights[f"{side}.distance_bias"] = Weight(table_name, "as_is")
        weights |= norm(f"{side}.norm", f"{side}.final_layer_norm", bias=False)
        if side == "decoder":
            weights |= _attention(f"{ours}.cross_attention", f"{theirs}.1", "EncDecAttention")
    copies = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
    if config.tie_embeddings:
        return Names(weights, copies | {"lm_head.weight": "shared.weight"}, unread=UNREAD)
    return Names(weights | table("lm_head.output", "lm_head") if config.lm_head else weights, copies, unread=UNREAD)


def _attention(ours: str, theirs: str, kind: str) -> dict[str, Weight]:
    parts = {part: part[0] for part in ("query", "key", "value", "output")}
    residual = norm(f"{ours}_residual.norm", f"{theirs}.layer_norm", bias=False)
    return blocks(ours, f"{theirs}.{kind}", parts, bias=False) | residual


def _read(json: Json, found: Mapping[str, Tensor]) -> T5Config:
    activation, gated = ACTIVATIONS[json["feed_forward_proj"]]
    said = json["tie_word_embeddings"]
    for name, made in (("dense_act_fn", _dense_activation(json["feed_forward_proj"])), ("is_gated_act", gated)):
        require(json, {name: made} if json[name] is not None else {})
    fields = our_fields(json, FIELDS)
    encoder_alone = json["architectures"] == ["T5EncoderModel"]
    fields["num_decoder_layers"] = 0 if encoder_alone else fields["num_decoder_layers"] or json["num_layers"]
    tied = said and not encoder_alone and _equal(found, "lm_head.weight", "shared.weight")
    return T5Config(
        **fields,
        lm_head=not encoder_alone and has_head(json, found, bare="T5Model", tied=tied),
        activation=activation,  # type: ignore[arg-type]
        gated=gated,
        # What older versions call tied is that the output is scaled; newer ones call everything tied. The tensors know.
        tie_embeddings=tied,
        scale_output=said if json["scale_decoder_outputs"] is None else json["scale_decoder_outputs"],
    )


def _dense_activation(feed_forward_proj: str) -> str:
    """What transformers makes of the name of a feed-forward network, and writes beside it."""
    return "gelu_new" if feed_forward_proj == "gated-gelu" else feed_forward_proj.removeprefix("gated-")


def _equal(found: Mapping[str, Tensor], first: str, second: str) -> bool:
    return not (first in found and second in found) or np.array_equal(found[first].read(), found[second].read())


def _write(config: T5Config) -> dict[str, Any]:
    require_config(config, "T5", experts=None)
    architecture = "T5EncoderModel" if not config.num_decoder_layers else "T5Model"
    architecture = "T5ForConditionalGeneration" if config.lm_head else architecture
    for name, value in ACTIVATIONS.items():
        if value == (config.activation, config.gated):
            return their_fields(config, FIELDS) | {
                "architectures": [architecture],
                "feed_forward_proj": name,
                "tie_word_embeddings": config.tie_embeddings or config.scale_output,
                "scale_decoder_outputs": config.scale_output,
                "is_encoder_decoder": config.num_decoder_layers > 0,
            }
    raise UserError(f"activation={config.activation!r} with gated={config.gated} has no name in transformers")


T5 = Family("t5", FIELDS, lambda name: name, _read, _write, _names, aliases=ALIASES, special_ids={"eos_token_id": 1})
