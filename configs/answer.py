"""Answer questions about passages with words of these: train a small BERT, or fine-tune one.

    python train.py configs/answer.py --data.train train.jsonl --init-from path/to/bert --workdir runs/answers

A record has a question, a passage, and the answer as it stands in the passage: in columns of these names of a .jsonl,
.parquet, .tsv or .csv file, or where data.columns says.
"""

from dataclasses import replace
from pathlib import Path
from runpy import run_path

from transformer_jax.data import Files
from transformer_jax.tasks import QuestionAnsweringConfig

classify = run_path(str(Path(__file__).with_name("classify.py")))["config"]

config = replace(
    classify,
    data=Files(columns={"question": "", "passage": "", "answer": ""}),
    task=QuestionAnsweringConfig(),
)
