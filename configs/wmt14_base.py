"""The base model of the 2017 paper on WMT 2014 English to German (Vaswani et al. 2017, sections 5 and 6.1).

Prepare the data once with `--data.download` and the extra [tfds], or elsewhere with TFDS. Afterwards take the mean of
the last checkpoints, as the paper does: `python -m transformer_jax checkpoints average runs/wmt14_base runs/mean`.
"""

from transformer_jax.data import BatchingConfig, Tfds, TokenizerConfig
from transformer_jax.models import TransformerConfig
from transformer_jax.tasks import BeamSearchConfig, TranslationConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=TransformerConfig.base(vocab_size=37_000, pad_id=None),
    data=Tfds("wmt14_translate/de-en", features={"source": "en", "target": "de"}, allow_empty=True),
    processor=TokenizerConfig(kind="bpe", vocab_size=37_000),
    batching=BatchingConfig(tokens=25_000, pack_length=256),
    optimizer=OptimizerConfig(schedule="inverse_square_root", warmup_steps=4_000, beta1=0.9, beta2=0.98, epsilon=1e-9),
    task=TranslationConfig(label_smoothing=0.1, decoding=BeamSearchConfig(num_beams=4, alpha=0.6, extra_length=50)),
    steps=100_000,
    evaluate_every=6_000,
    save_every=1_500,  # ten minutes of the paper, which takes the mean of the last five
    keep=5,
)
