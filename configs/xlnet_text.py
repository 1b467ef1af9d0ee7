"""A small XLNet, trained as XLNet is: to predict tokens of a text in random order, by two streams of attention."""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Text, TokenizerConfig
from transformer_jax.models import XLNetConfig
from transformer_jax.tasks import PermutationLMConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        XLNetConfig.base(vocab_size=None, pad_id=None),
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_layers=4,
        max_length=64,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    ),
    data=Text(),
    task=PermutationLMConfig(),
    processor=TokenizerConfig(kind="unigram", vocab_size=4_000),
    batching=BatchingConfig(rows=32),
    optimizer=OptimizerConfig(
        schedule="linear", peak=1.5e-3, warmup_steps=300, beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0
    ),
    steps=2_500,
)
