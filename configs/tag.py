"""Tag the words of texts, names of people and places for example: train a small BERT, or fine-tune one.

    python train.py configs/tag.py --data.train train.jsonl --init-from path/to/bert --workdir runs/tags

A record has the words of a text and as many tags, such as B-PER, I-PER and O: in lists in a .jsonl or .parquet file,
with spaces between them in a .tsv or .csv file. They are in columns of these names, or where data.columns says.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from transformer_jax.data import Files
from transformer_jax.tasks import TaggingConfig

classify = run_path(str(Path(__file__).with_name("classify.py")))["config"]

config = replace(classify, data=Files(columns={"text": "", "tags": ""}), task=TaggingConfig())
