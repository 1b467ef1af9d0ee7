"""The loss of language models beside what is known without any context: `python benchmarks/unigram.py RUN [RUN ...]`.

A model that knows how frequent each token is, and nothing of its neighbours, has the cross-entropy of the validation
text under the frequencies of the training text (plus one for each token). What a run is below that, it has from
context. For a T5 the loss per token of text is shown: a quarter of what it writes are sentinels, which are easy.
"""

import argparse
from pathlib import Path

import numpy as np

from transformer_jax.training import Run
from transformer_jax.training.metrics import read_metrics


def unigram_entropy(run: Run) -> float:
    """Nats per token of the validation text."""
    tokenizer, data = run.processor, run.config.data
    counts = np.ones(tokenizer.vocab_size)
    for document in data.split("train"):
        np.add.at(counts, np.asarray(tokenizer.encode([document["text"]])[0], int), 1)
    losses = np.log(counts.sum()) - np.log(counts)
    valid = [id for document in data.split("valid") for id in tokenizer.encode([document["text"]])[0]]
    return float(losses[valid].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="workdirs of runs that were evaluated")
    for path in parser.parse_args().runs:
        run = Run.open(path)
        records = read_metrics(run.workdir.metrics_file)
        entropy = unigram_entropy(run)
        print(f"{path}: {entropy:.3f} nats per token without context")
        for record in (record for record in records if record["split"] == "valid"):
            loss = record.get("text_loss", record["loss"])
            print(f"  step {record['step']:6,}: loss {loss:.3f}, {entropy - loss:+.3f} from context")


if __name__ == "__main__":
    main()
