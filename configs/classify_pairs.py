"""Classify pairs of texts, such as whether one follows from the other: `classify.py` with a second text, the pair.

python train.py configs/classify_pairs.py --init-from path/to/bert --data.train pairs.tsv --workdir runs/pairs
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from transformer_jax.data import Files
from transformer_jax.tasks import ClassificationConfig

classify = run_path(str(Path(__file__).with_name("classify.py")))["config"]

config = replace(
    classify, data=Files(columns={"text": "", "pair": "", "label": ""}), task=ClassificationConfig(pairs=True)
)
