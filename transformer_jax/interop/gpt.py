"""GPT-2 and Llama checkpoints."""

import re
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.functional import RotaryScaling
from transformer_jax.interop.family import (
    Family,
    Json,
    blocks,
    has_head,
    norm,
    read_fields,
    require,
    require_config,
    table,
    write_fields,
)
from transformer_jax.interop.tensor import Tensor
from transformer_jax.interop.weights import Names, Weight
from transformer_jax.models.gpt import GPTConfig

GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_length": "n_positions",
    "dropout_rate": "resid_pdrop",
    "attention_dropout_rate": "attn_pdrop",
    "activation": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
    "tie_embeddings": "tie_word_embeddings",
}
GPT2_DEFAULTS = {
    "vocab_size": 50_257,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "n_inner": None,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}

LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_key_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "max_length": "max_position_embeddings",
    "attention_dropout_rate": "attention_dropout",
    "activation": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
}
LLAMA_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
}
"""The fields of each kind of rotary scaling."""


def _gpt2_names(config: GPTConfig) -> Names:
    layer, ours = "transformer.h.{layer}", "decoder.blocks"
    weights = table("embedding", "transformer.wte") | table("position_embedding", "transformer.wpe")
    for part, name in enumerate(("query", "key", "value")):  # one after the other in one tensor
        path = f"{ours}.self_attention.{name}"
        weights[f"{path}.weight"] = Weight(f"{layer}.attn.c_attn.weight", "inputs_first", (part, 3))
        weights[f"{path}.bias"] = Weight(f"{layer}.attn.c_attn.bias", part=(part, 3))
    for path, name in (
        ("self_attention.output", "attn.c_proj"),
        ("feed_forward.input", "mlp.c_fc"),
        ("feed_forward.output", "mlp.c_proj"),
    ):
        weights[f"{ours}.{path}.weight"] = Weight(f"{layer}.{name}.weight", "inputs_first")
        weights[f"{ours}.{path}.bias"] = Weight(f"{layer}.{name}.bias")
    weights |= norm(f"{ours}.self_attention_residual.norm", f"{layer}.ln_1")
    weights |= norm(f"{ours}.feed_forward_residual.norm", f"{layer}.ln_2") | norm("norm", "transformer.ln_f")
    return _with_output(config, weights, "transformer.wte.weight")


def _llama_names(config: GPTConfig) -> Names:
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
    return _with_output(config, weights, "model.embed_tokens.weight")


def _with_output(config: GPTConfig, weights: dict[str, Weight], embedding: str) -> Names:
    if config.tie_embeddings:
        return Names(weights, {"lm_head.weight": embedding})
    return Names(weights | table("output", "lm_head") if config.lm_head else weights)


def _read_gpt2(json: Json, found: Mapping[str, Tensor]) -> GPTConfig:
    require(json, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GPTConfig(
        **read_fields(json, GPT2_FIELDS),
        lm_head=has_head(json, found, bare="GPT2Model", tied=json["tie_word_embeddings"]),
        d_ff=json["n_inner"] or 4 * json["n_embd"],
        gated=False,
        norm="layer",
        positions="learned",
        attention_bias=True,
        feed_forward_bias=True,
    )


def _write_gpt2(config: GPTConfig) -> dict[str, Any]:
    require_config(
        config,
        "GPT-2",
        gated=False,
        norm="layer",
        experts=None,
        attention_bias=True,
        feed_forward_bias=True,
        size_of_head=config.d_model // config.num_heads,
        num_key_heads=config.num_heads if config.num_key_heads else None,
    )
    architecture = "GPT2LMHeadModel" if config.lm_head else "GPT2Model"
    rest = {"architectures": [architecture], "n_inner": config.d_ff, "embd_pdrop": config.dropout_rate}
    return write_fields(config, GPT2_FIELDS) | rest


def _read_llama(json: Json, found: Mapping[str, Tensor]) -> GPTConfig:
    rope = dict(json.get("rope_parameters") or json.get("rope_scaling") or {})
    require({**json, **rope}, pretraining_tp=1, partial_rotary_factor=1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALING):
        raise UserError(f"config.json: rope_type={kind!r} cannot be loaded; it must be default, {' or '.join(SCALING)}")
    scaling = None
    if kind != "default":
        fields = SCALING[kind]
        scaling = RotaryScaling(kind, **{ours: rope[theirs] for ours, theirs in fields.items() if theirs in rope})
    return GPTConfig(
        **read_fields(json, LLAMA_FIELDS),
        lm_head=has_head(json, found, bare="LlamaModel", tied=json["tie_word_embeddings"]),
        dropout_rate=0.0,
        gated=True,
        norm="rms",
        positions="rotary",
        rotary_base=float(rope.get("rope_theta") or json.get("rope_theta") or 10_000.0),
        rotary_scaling=scaling,
    )


def _write_llama(config: GPTConfig) -> dict[str, Any]:
    require_config(config, "Llama", gated=True, norm="rms", experts=None)
    scaling = config.rotary_scaling
    rope: dict[str, Any] = {"rope_type": scaling.kind if scaling else "default"}
    if scaling is not None:
        rope |= {theirs: getattr(scaling, ours) for ours, theirs in SCALING[scaling.kind].items()}
    return write_fields(config, LLAMA_FIELDS) | {
        "architectures": ["LlamaForCausalLM" if config.lm_head else "LlamaModel"],
        "num_key_value_heads": config.num_key_heads or config.num_heads,
        "head_dim": config.size_of_head,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rotary_base},
    }


def _rename_gpt2(name: str) -> str | None:
    if re.search(r"\.attn\.(bias|masked_bias)$", name):  # masks that old checkpoints have among their weights
        return None
    return f"transformer.{name}" if name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name


def _rename_llama(name: str) -> str | None:
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


GPT2 = Family("gpt2", GPT2_DEFAULTS, _rename_gpt2, _read_gpt2, _write_gpt2, _gpt2_names)
LLAMA = Family("llama", LLAMA_DEFAULTS, _rename_llama, _read_llama, _write_llama, _llama_names)
