"""Classify texts: train a small BERT, or fine-tune one that was trained before.

    python train.py configs/classify.py --data.train reviews.tsv --init-from path/to/bert --workdir runs/reviews
    python train.py configs/classify.py --data.train reviews.csv --data.columns.text review --data.columns.label stars

A .tsv, .csv, .jsonl or .parquet file has a text and its label in columns of these names, or where data.columns says. In
a table whose first line does not have the names, they are the first two columns. `classify_pairs.py` is for two texts.
Without valid files some records of train are held out. Without a checkpoint to start from, the model is a small one.
"""

from dataclasses import replace

from transformer_jax.data import BatchingConfig, Files, TokenizerConfig
from transformer_jax.models import BertConfig
from transformer_jax.tasks import ClassificationConfig
from transformer_jax.training import Config, OptimizerConfig

config = Config(
    model=replace(
        BertConfig.base(vocab_size=None, pad_id=None),
        d_model=128,
        num_heads=4,
        d_ff=512,
        num_layers=2,
        max_length=128,
    ),
    data=Files(columns={"text": "", "label": ""}),
    task=ClassificationConfig(),
    processor=TokenizerConfig(
        kind="wordpiece", vocab_size=4_000, pad="[PAD]", begin="[CLS]", end="[SEP]", unknown="[UNK]"
    ),
    batching=BatchingConfig(rows=32),
    optimizer=OptimizerConfig(schedule="linear", peak=1e-4, warmup_steps=100, beta2=0.999, epsilon=1e-6, clip_norm=1.0),
    steps=1_000,
    evaluate_every=200,
)
