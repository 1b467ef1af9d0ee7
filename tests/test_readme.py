"""The programs in the README do what it says."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.data import Tokenizer, TokenizerConfig
from transformer_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
TEXTS = [("a great film", "good"), ("a dull one", "bad"), ("great great film", "good"), ("a dull dull film", "bad")]


def block(mark: str) -> str:
    (found,) = [text for text in BLOCKS if mark in text]
    return found


def num_lines(code: str) -> int:
    return len([line for line in code.splitlines() if line.strip()])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A small checkpoint of transformers with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "bert"
    found = tj.from_pretrained(Path(__file__).parent / "reference" / "fixtures" / "bert_pretraining")
    names = {"pad": "[PAD]", "begin": "[CLS]", "end": "[SEP]", "unknown": "[UNK]"}
    config = TokenizerConfig(kind="wordpiece", vocab_size=found.config.vocab_size, **names)
    tokenizer = Tokenizer.train([text for text, _ in TEXTS], config)
    tj.save_pretrained(found.model, folder, tokenizer=tokenizer)
    return folder


def test_fine_tuning_in_a_notebook(bert, tmp_path, capsys):
    code = block("Config(\n    init_from")
    assert num_lines(code) < 15
    code = code.replace("path/to/bert", str(bert)).replace("runs/reviews", str(tmp_path / "run"))
    names: dict = {}
    exec(code.replace("steps=100", "steps=2"), names)
    assert capsys.readouterr().out.strip() in ("['good']", "['bad']")
    state, pretrained = names["state"], tj.from_pretrained(bert)
    assert int(state.step) == 2
    change = state.model.embedding.table[...] - pretrained.model.embedding.table[...]
    assert 0 < np.abs(change).max() < 1e-3  # it was started from the checkpoint, and trained
    text = (tmp_path / "run" / "config.json").read_text()
    assert "a great film" not in text


def test_a_loop_of_ones_own(bert):
    code = block("make_train_step(loss, optimizer)")
    assert num_lines(code) < 20
    names: dict = {"tj": tj, "jax": jax, "np": np, "batches": [([text for text, _ in TEXTS], [1, 0, 1, 0])] * 60}
    imports = "import dataclasses, optax\nfrom flax import nnx\nfrom transformer_jax import functional as F\n"
    losses = []
    code = code.replace("path/to/bert", str(bert)).replace("adamw(5e-5)", "adamw(1e-2)")
    names["losses"] = losses
    exec(imports + code + "    losses.append(float(metrics['loss']))\n", names)
    assert "initialized: classification_head" in names["report"]
    assert losses[-1] < 0.2 < losses[0]


def test_a_task_of_ones_own(tmp_path):
    """Trained, killed, resumed bit for bit, and evaluated, from another folder and without the package knowing it."""
    (tmp_path / "similarity.py").write_text(block("class SimilarityConfig").replace("max_length=512", "max_length=32"))
    random = np.random.default_rng(0)
    lines = []
    for _ in range(80):
        first = random.choice(["red", "blue", "cat", "dog"], 3)
        second = np.where(random.random(3) < 0.5, first, random.choice(["red", "blue", "cat", "dog"], 3))
        lines.append(f"{' '.join(first)}\t{' '.join(second)}\t{np.mean(first == second):.2f}")
    (tmp_path / "pairs.tsv").write_text("\n".join(lines))
    size = [
        "--model.d-model",
        "16",
        "--model.num-heads",
        "2",
        "--model.num-layers",
        "1",
        "--processor.vocab-size",
        "60",
    ]
    flags = ["similarity.py", "--data.train", "pairs.tsv", *size, "--save-every", "2", "--log-every", "1"]

    def program(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
        found = subprocess.run(
            [sys.executable, "-m", "transformer_jax", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert found.returncode == code, found.stderr
        return found

    program("train", *flags, "--steps", "6", "--optimizer.total-steps", "6", "--workdir", "whole")
    program("train", *flags, "--steps", "4", "--optimizer.total-steps", "6", "--workdir", "halves")
    program("train", *flags, "--steps", "6", "--optimizer.total-steps", "6", "--workdir", "halves")
    whole, halves = (
        {line["step"]: line for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["split"] == "train"}
        for name in ("whole", "halves")
    )
    assert [whole[step]["loss"] for step in range(1, 7)] == [halves[step]["loss"] for step in range(1, 7)]
    found = program("evaluate", "whole", "--config", "similarity.py").stdout
    assert '"correlation"' in found
    refused = program("evaluate", "whole", code=1).stderr
    assert "--config similarity.py" in refused and refused.count("\n") == 1
    assert "cannot write text" in program("generate", "whole", "--config", "similarity.py", code=1).stderr
