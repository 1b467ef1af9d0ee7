"""The base model of the 2017 paper on WMT 2014 English to German (Vaswani et al. 2017, sections 5 and 6.1)."""

from transformer_jax.data import BatchingConfig, Tfds, TokenizerConfig
from transformer_jax.models import TransformerConfig
from transformer_jax.tasks import DecodingConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=TransformerConfig.base(vocab_size=37_000, pad_id=None),
    data=Tfds("wmt14_translate/de-en", source_language="en", target_language="de"),
    tokenizer=TokenizerConfig(vocab_size=37_000),
    batching=BatchingConfig(tokens=25_000, num_buckets=8),
    optimizer=OptimizerConfig(schedule="inverse_square_root", warmup_steps=4_000, beta1=0.9, beta2=0.98, epsilon=1e-9),
    label_smoothing=0.1,
    decoding=DecodingConfig(num_beams=4, alpha=0.6, extra_length=50),
    steps=100_000,
    evaluate_every=5_000,
    save_every=1_000,
)
