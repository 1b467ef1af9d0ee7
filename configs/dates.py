"""The default: English dates, times, numbers and units into five languages, in some three minutes on two CPU cores."""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Dates, TokenizerConfig
from transformer_jax.models import TransformerConfig
from transformer_jax.tasks import BeamSearchConfig, TranslationConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        TransformerConfig.base(vocab_size=None, pad_id=None),
        d_model=128,
        num_heads=4,
        d_ff=256,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout_rate=0.0,  # values never come again, so there is nothing to learn by heart
        max_length=128,
    ),
    data=Dates(train_size=60_000),
    processor=TokenizerConfig(vocab_size=512, max_records=10_000),
    batching=BatchingConfig(tokens=1024, pack_length=32),
    optimizer=OptimizerConfig(schedule="linear", peak=2e-3, warmup_steps=200),
    # A source has one translation.
    task=TranslationConfig(label_smoothing=0.0, decoding=BeamSearchConfig(num_beams=1)),
    steps=1500,
    evaluate_every=1000,
    save_every=500,
)
