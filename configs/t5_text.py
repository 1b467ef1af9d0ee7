"""A small T5 v1.1, trained as T5 is: to write the spans that were left out of a text."""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Text, TokenizerConfig
from transformer_jax.models import T5Config
from transformer_jax.tasks import DenoisingConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        T5Config.small(vocab_size=None, pad_id=None),
        d_model=128,
        num_heads=4,
        head_size=32,
        num_encoder_layers=3,
        num_decoder_layers=3,
        max_length=64,
        dropout_rate=0.0,
    ).v1_1(d_ff=256),
    data=Text(),
    task=DenoisingConfig(),
    processor=TokenizerConfig(kind="unigram", vocab_size=4_000),
    batching=BatchingConfig(rows=32),
    optimizer=OptimizerConfig(
        schedule="linear", peak=2e-3, warmup_steps=300, beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0
    ),
    steps=3_000,
)
