"""A small GPT on characters, at the size of nanoGPT's recipe for a CPU: any text, by default Python's documentation.

`python train.py configs/gpt_text.py --data.train my.txt --workdir runs/mine`, then
`echo "Once upon" | python -m transformer_jax generate runs/mine`.
"""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Text, TokenizerConfig
from transformer_jax.models import GPTConfig
from transformer_jax.tasks import CausalLMConfig, SamplingConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        GPTConfig.small(vocab_size=None),
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_layers=4,
        max_length=64,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        unroll=4,
    ),
    data=Text(),
    task=CausalLMConfig(separate=False, decoding=SamplingConfig(temperature=0.8)),
    processor=TokenizerConfig(kind="characters", vocab_size=10_000),
    batching=BatchingConfig(rows=12),
    optimizer=OptimizerConfig(
        schedule="cosine", peak=3e-3, warmup_steps=100, beta2=0.99, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    ),
    steps=2_000,
    evaluate_every=1_000,
)
