"""Translate between any two languages, from files of your own.

    python train.py configs/translate_files.py --data.train train.en train.de --data.valid valid.en valid.de
    python train.py configs/translate_files.py --data.train pairs.tsv --workdir runs/mine

Two files correspond line by line, or one has the pairs as tab-separated columns (.tsv) or JSON objects (.jsonl).
Without valid files some records of train are held out. The model is small enough for a CPU; see --help for its size.
"""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Files, TokenizerConfig
from transformer_jax.models import TransformerConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        TransformerConfig.base(vocab_size=None, pad_id=None),
        d_model=256,
        num_heads=4,
        d_ff=1024,
        num_encoder_layers=3,
        num_decoder_layers=3,
        norm="pre",
        max_length=256,
    ),
    data=Files(),
    processor=TokenizerConfig(kind="byte_bpe", vocab_size=8_000),
    batching=BatchingConfig(tokens=2048, pack_length=64),
    optimizer=OptimizerConfig(schedule="linear", peak=1e-3, warmup_steps=500),
    steps=10_000,
    evaluate_every=2_000,
    save_every=500,
    keep=5,
)
