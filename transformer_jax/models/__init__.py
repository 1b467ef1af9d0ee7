"""Architectures: one file each, with its config, its module and its named sizes."""

from transformer_jax.models.attention_weights import AttentionWeights
from transformer_jax.models.bert import Bert, BertConfig
from transformer_jax.models.config import ModelConfig
from transformer_jax.models.decoding_state import DecodingState
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.t5 import T5, T5Config
from transformer_jax.models.transformer import Transformer, TransformerConfig
from transformer_jax.models.xlnet import XLNet, XLNetConfig

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
]
