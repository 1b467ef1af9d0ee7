"""A small BERT, trained as BERT is: masked tokens and next sentences, a line of the text being a sentence.

The text is Python's documentation by default; `--data.train FILES --data.document paragraph` takes your own.
"""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Text, TokenizerConfig
from transformer_jax.models import BertConfig
from transformer_jax.tasks import MaskedLMConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        BertConfig.base(vocab_size=None, pad_id=None),
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
    task=MaskedLMConfig(whole_words=True),
    processor=TokenizerConfig(
        kind="wordpiece", vocab_size=4_000, pad="[PAD]", begin="[CLS]", end="[SEP]", unknown="[UNK]"
    ),
    batching=BatchingConfig(rows=32),
    optimizer=OptimizerConfig(
        schedule="linear", peak=1.5e-3, warmup_steps=300, beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0
    ),
    steps=4_000,
)
