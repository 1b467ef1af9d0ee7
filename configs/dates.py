"""The default: English dates, times, numbers and units into five languages, in about three minutes on two CPU cores."""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Dates, TokenizerConfig
from transformer_jax.models import TransformerConfig
from transformer_jax.tasks import DecodingConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        TransformerConfig.base(vocab_size=None, pad_id=None),
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout_rate=0.0,
        max_length=128,
    ),
    data=Dates(),
    tokenizer=TokenizerConfig(vocab_size=512),
    batching=BatchingConfig(tokens=2048, num_buckets=4),
    optimizer=OptimizerConfig(warmup_steps=400, scale=1.0),
    decoding=DecodingConfig(num_beams=1),
    steps=3000,
    evaluate_every=1000,
)
