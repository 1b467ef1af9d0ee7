"""The big model of the 2017 paper on WMT 2014 English to German: `wmt14_base.py` but for its size and length."""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from transformer_jax.models import TransformerConfig

base = run_path(str(Path(__file__).with_name("wmt14_base.py")))["config"]

config = replace(
    base,
    model=TransformerConfig.big(vocab_size=37_000, pad_id=None),
    steps=300_000,
    save_every=600,  # ten minutes of the paper again
    keep=20,
)
