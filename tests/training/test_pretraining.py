"""Every pre-training task: a run that stopped and went on equals one that never stopped, bit for bit."""

import jax
import numpy as np
import pytest

from tests.test_configs import ROOT, TEXT, TINY, TWO_STACKS
from transformer_jax.commands.train import parse_config
from transformer_jax.training import train
from transformer_jax.training.metrics import read_metrics

ONE_STACK = ["--model.num-layers", "1"]
CONFIGS = {
    "gpt_text.py": ONE_STACK,
    "bert_text.py": [*ONE_STACK, "--processor.vocab-size", "100"],
    "t5_text.py": [*TWO_STACKS, "--processor.vocab-size", "320"],
    "xlnet_text.py": [*ONE_STACK, "--processor.vocab-size", "320"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_stopped_and_resumed_equals_never_stopped(name, tmp_path):
    documents = [f"The house has {n} doors.\nIt is old.\nIt has {n + 1} windows too." for n in range(20)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    flags = [*TINY, *TEXT, *CONFIGS[name], "--data.train", str(tmp_path / "a.txt"), "--data.document", "paragraph"]
    flags += ["--optimizer.total-steps", "5", "--optimizer.warmup-steps", "1", "--log-every", "1"]
    flags += ["--model.dropout-rate", "0.1"]

    def run(workdir, steps):
        arguments = [str(ROOT / "configs" / name), *flags, "--workdir", str(tmp_path / workdir), "--steps", str(steps)]
        return train(parse_config(arguments, "train.py"))[1]

    whole = run("whole", 5)
    run("cut", 2)
    resumed = run("cut", 5)
    for one, other in zip(jax.tree.leaves(whole.model), jax.tree.leaves(resumed.model), strict=True):
        np.testing.assert_array_equal(one, other)

    def losses(workdir):
        lines = read_metrics(tmp_path / workdir / "metrics.jsonl")
        return {(line["step"], line["split"]): line["loss"] for line in lines if line["split"] == "train"}

    assert losses("whole") == losses("cut") and len(losses("whole")) == 5
