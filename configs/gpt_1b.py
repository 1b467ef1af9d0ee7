"""A GPT of 1.3 billion parameters (the size of GPT-3 XL, Brown et al. 2020, table 2.1) for 256 chips of TPU v5e.

    python -m transformer_jax plan gpt_1b --topology v5e:16x16
    python train.py gpt_1b --data.train text/*.txt --workdir runs/gpt_1b

The tokenizer has 50,257 ids, as that of GPT-2; the embedding has 50,304 rows, so that they divide over mesh.tensor (the
next multiple of 128, the width of a TPU's matrix unit). A batch is 1,048,576 tokens: 512 rows of 2,048.
"""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Text, TokenizerConfig
from transformer_jax.models import GPTConfig
from transformer_jax.parallel import MeshConfig
from transformer_jax.tasks import CausalLMConfig, SamplingConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        GPTConfig.small(vocab_size=50_304),
        d_model=2048,
        num_heads=16,
        d_ff=8192,
        num_layers=24,
        max_length=2048,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        positions="rotary",
    ),
    data=Text(document="paragraph"),
    task=CausalLMConfig(decoding=SamplingConfig(temperature=0.8)),
    processor=TokenizerConfig(kind="byte_bpe", vocab_size=50_257),
    batching=BatchingConfig(rows=512),
    optimizer=OptimizerConfig(
        schedule="cosine", peak=2e-4, warmup_steps=2_000, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=1.0
    ),
    mesh=MeshConfig(fsdp=64, tensor=4),
    steps=100_000,
    evaluate_every=5_000,
    save_every=1_000,
)
