"""Architectures: one file each, with its config, its module and its named sizes."""

from typing import Any

from flax import nnx

from transformer_jax.models.bert import Bert, BertConfig
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.encoder_decoder import AttentionWeights
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.t5 import T5, T5Config
from transformer_jax.models.transformer import Transformer, TransformerConfig
from transformer_jax.models.xlnet import XLNet, XLNetConfig

ModelConfig = TransformerConfig | BertConfig | GPTConfig | T5Config | XLNetConfig

__all__ = [
    "GPT",
    "T5",
    "AttentionWeights",
    "Bert",
    "BertConfig",
    "DecodingState",
    "GPTConfig",
    "ModelConfig",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "XLNet",
    "XLNetConfig",
    "make_model",
]


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> Any:
    """The model of a config, whichever it is."""
    kinds = {TransformerConfig: Transformer, BertConfig: Bert, GPTConfig: GPT, T5Config: T5, XLNetConfig: XLNet}
    return kinds[type(config)](config, rngs=rngs)
