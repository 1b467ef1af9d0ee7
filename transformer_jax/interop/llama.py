"""Llama checkpoints."""

from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.functional import RotaryScaling
from transformer_jax.interop.family import (
    ACTIVATION,
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
    LAYERS,
    OBJECT,
    POSITIVE,
    RATE,
    SIZE,
    Field,
    Json,
    Kind,
    check_fields,
    choice,
    optional,
    short,
)
from transformer_jax.interop.gpt import with_output
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names
from transformer_jax.models.gpt import GPTConfig

ONE = Kind("1, or null", lambda value: value is None or value == 1)
FIELDS = {
    "vocab_size": Field(SIZE, "vocab_size"),
    "hidden_size": Field(SIZE, "d_model"),
    "num_attention_heads": Field(SIZE, "num_heads"),
    "num_key_value_heads": Field(optional(SIZE), "num_key_heads", None),
    "head_dim": Field(optional(SIZE), "head_size", None),
    "intermediate_size": Field(SIZE, "d_ff"),
    "num_hidden_layers": Field(LAYERS, "num_layers"),
    "max_position_embeddings": Field(SIZE, "max_length"),
    "attention_dropout": Field(optional(RATE), "attention_dropout_rate", 0.0),
    "hidden_act": Field(ACTIVATION, "activation", "silu"),
    "rms_norm_eps": Field(POSITIVE, "norm_epsilon", 1e-6),
    "tie_word_embeddings": Field(FLAG, "tie_embeddings", False),
    "attention_bias": Field(FLAG, "attention_bias", False),
    "mlp_bias": Field(FLAG, "feed_forward_bias", False),
    "rope_parameters": Field(optional(OBJECT), default=None),
    "rope_scaling": Field(optional(OBJECT), default=None),
    "rope_theta": Field(optional(POSITIVE), default=None),
    "original_max_position_embeddings": Field(optional(SIZE), default=None),
    "partial_rotary_factor": Field(ONE, default=None),
    "pretraining_tp": Field(ONE, default=1),
}
SCALING = {
    "linear": {"factor": Field(POSITIVE, "factor")},
    "llama3": {
        "factor": Field(POSITIVE, "factor"),
        "low_freq_factor": Field(POSITIVE, "low_frequency_factor"),
        "high_freq_factor": Field(POSITIVE, "high_frequency_factor"),
        "original_max_position_embeddings": Field(optional(SIZE), "original_length", None),
    },
}
"""The fields of each kind of rotary scaling."""
ROTARY_KIND = choice(("default", *SCALING))


def _names(config: GPTConfig) -> Names:
    layer, ours = "model.layers.{layer}", "decoder.blocks"
    attention = {
        "self_attention.query": "self_attn.q_proj",
        "self_attention.key": "self_attn.k_proj",
        "self_attention.value": "self_attn.v_proj",
        "self_attention.output": "self_attn.o_proj",
    }
    feed_forward = {
        "feed_forward.input": "mlp.up_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.output": "mlp.down_proj",
    }
    weights = table("embedding", "model.embed_tokens") | norm("norm", "model.norm", bias=False)
    weights |= blocks(ours, layer, attention, bias=config.attention_bias)
    weights |= blocks(ours, layer, feed_forward, bias=config.feed_forward_bias)
    weights |= norm(f"{ours}.self_attention_residual.norm", f"{layer}.input_layernorm", bias=False)
    weights |= norm(f"{ours}.feed_forward_residual.norm", f"{layer}.post_attention_layernorm", bias=False)
    return with_output(config, weights, "model.embed_tokens.weight")


def _read(json: Json, found: Mapping[str, Tensor]) -> GPTConfig:
    base, scaling = _read_rotary(json)
    fields = our_fields(json, FIELDS)
    return GPTConfig(
        **fields | {"attention_dropout_rate": fields["attention_dropout_rate"] or 0.0},
        lm_head=has_head(json, found, bare="LlamaModel", tied=json["tie_word_embeddings"]),
        dropout_rate=0.0,
        gated=True,
        norm="rms",
        positions="rotary",
        rotary_base=base,
        rotary_scaling=scaling,
    )


def _read_rotary(json: Json) -> tuple[float, RotaryScaling | None]:
    """The base and the scaling of rotary positions: in rope_parameters, or as transformers 4 has them."""
    said = [name for name in ("rope_parameters", "rope_scaling") if json[name]]
    found = [_read_rope(json, json[name], name) for name in said] or [_read_rope(json, {}, "rope_parameters")]
    if found[0] != found[-1]:
        raise UserError("config.json: rope_parameters and rope_scaling say different things; leave out the wrong one")
    return found[0]


def _read_rope(json: Json, rope: Json, name: str) -> tuple[float, RotaryScaling | None]:
    where = f"config.json: {name}"
    said = check_fields(
        {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))},
        {
            "rope_type": Field(ROTARY_KIND),
            "rope_theta": Field(optional(POSITIVE), default=None),
            "partial_rotary_factor": Field(ONE, default=None),
        },
        where,
    )
    base, kind = said["rope_theta"] or json["rope_theta"] or 10_000.0, said["rope_type"]
    if kind == "default":
        return base, None
    values = our_fields(check_fields(rope, SCALING[kind], where), SCALING[kind])
    if kind == "llama3":
        before = json["original_max_position_embeddings"] or values["original_length"]
        values["original_length"] = before or json["max_position_embeddings"]
        if values["low_frequency_factor"] >= values["high_frequency_factor"]:
            given = f"low_freq_factor={short(rope['low_freq_factor'])}"
            raise UserError(f"{where}: {given} is invalid; it must be below high_freq_factor")
    return base, RotaryScaling(kind, **values)


def _write(config: GPTConfig) -> dict[str, Any]:
    require_config(config, "Llama", gated=True, norm="rms", experts=None, heads=())
    scaling = config.rotary_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind if scaling else "default"}
    if scaling is not None:
        rope |= their_fields(scaling, SCALING[scaling.kind])
    return their_fields(config, FIELDS) | {
        "architectures": ["LlamaForCausalLM" if config.lm_head else "LlamaModel"],
        "num_key_value_heads": config.num_key_heads or config.num_heads,
        "head_dim": config.size_of_head,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rotary_base},
    }


def _rename(name: str) -> str | None:
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


LLAMA = Family("llama", FIELDS, _rename, _read, _write, _names, special_ids={"bos_token_id": 1, "eos_token_id": 2})
