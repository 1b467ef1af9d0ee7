"""Every config trains for two steps at a tiny size."""

import json
import math
from pathlib import Path
from typing import ClassVar

import pytest

from transformer_jax.commands.train import parse_config, train_and_show
from transformer_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
TINY = [
    *("--model.d-model", "16", "--model.num-heads", "2", "--model.d-ff", "32"),
    *("--steps", "2", "--evaluate-every", "2", "--strategy", "jit"),
]
TWO_STACKS = ["--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"]
TRANSLATION = [
    *TWO_STACKS,
    *("--batching.tokens", "64", "--batching.num-buckets", "1", "--batching.pack-length", "32"),
    *("--task.decoding.extra-length", "4"),
]
TEXT = ["--batching.rows", "4", "--model.max-length", "24"]
LABELLED = [*TEXT, "--model.num-layers", "1", "--processor.vocab-size", "100"]
DATES = ["--data.train-size", "50", "--data.valid-size", "3", "--data.test-size", "3"]
WMT = ["--model.vocab-size", "300", "--processor.vocab-size", "300", "--model.max-length", "32"]


@pytest.fixture(scope="module")
def wmt14(tmp_path_factory):
    """A WMT14 of a few sentences, prepared as TFDS would prepare the real one as array_record."""
    import tensorflow_datasets as tfds

    with tfds.core.registered.skip_registration():

        class Wmt14Translate(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")
            BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="de-en")]

            def _info(self):
                features = tfds.features.FeaturesDict({"de": tfds.features.Text(), "en": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features)

            def _split_generators(self, manager):
                return {split: self._generate_examples() for split in ("train", "validation", "test")}

            def _generate_examples(self):
                for n in range(12):
                    yield n, {"en": f"The house has {n} doors.", "de": f"Das Haus hat {n} Türen."}

    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    Wmt14Translate(config="de-en", data_dir=folder, file_format="array_record").download_and_prepare()
    return ["--data.data-dir", str(folder)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Twelve sentences in two files, and what files have besides: an empty line, and one that is too long."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in (("a", "Türen\u2028und ein Haus"), ("b", "個のドアと家")):
        lines = [f"{n} {text}" for n in range(12)]
        (folder / name).write_text("\n".join(["", *lines, text * 40]), encoding="utf-8")
    both = [str(folder / "a"), str(folder / "b")]
    return ["--data.train", *both, "--data.valid", *both, "--data.test", *both, "--data.allow-empty"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few documents of several lines, in two scripts."""
    folder = tmp_path_factory.mktemp("text")
    documents = [f"Das Haus hat {n} Türen.\n個のドアと{n}家\nEs hat auch {n + 1} Fenster." for n in range(20)]
    (folder / "a.txt").write_text("\n\n".join(documents), encoding="utf-8")
    return ["--data.train", str(folder / "a.txt"), "--data.document", "paragraph"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Records with a label, a tag for each word, and a question with its answer."""
    path = tmp_path_factory.mktemp("labelled") / "records.jsonl"
    records = []
    for n in range(60):
        name = ("Anna", "Otto", "Léa")[n % 3]
        records.append(
            {
                "text": f"{name} has {n} doors".split(),
                "tags": ["B-PER", "O", "O", "O"],
                "review": f"{n} doors are {'good' if n % 2 else 'bad'}",
                "label": "good" if n % 2 else "bad",
                "question": "Who has doors?",
                "passage": f"{name} has {n} doors.",
                "answer": name,
            }
        )
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return ["--data.train", str(path)]


CONFIGS = {
    "dates.py": lambda fixture: [*TRANSLATION, *DATES],
    "translate_files.py": lambda fixture: [*TRANSLATION, "--processor.vocab-size", "300", *fixture("files")],
    "wmt14_base.py": lambda fixture: [*TRANSLATION, *WMT, *fixture("wmt14")],
    "gpt_1b.py": lambda fixture: [
        *(*TEXT, "--model.num-layers", "1", "--task.decoding.new-tokens", "8", "--processor.vocab-size", "300"),
        *("--model.vocab-size", "304", "--mesh.fsdp", "2", "--mesh.tensor", "2", *fixture("text")),
    ],
    "wmt14_big.py": lambda fixture: [*TRANSLATION, *WMT, *fixture("wmt14")],
    "gpt_text.py": lambda fixture: [
        *TEXT,
        "--model.num-layers",
        "1",
        "--task.decoding.new-tokens",
        "8",
        *fixture("text"),
    ],
    "bert_text.py": lambda fixture: [
        *(*TEXT, "--model.num-layers", "1", "--processor.vocab-size", "100", *fixture("text"))
    ],
    "t5_text.py": lambda fixture: [*TEXT, *TWO_STACKS, "--processor.vocab-size", "320", *fixture("text")],
    "xlnet_text.py": lambda fixture: [
        *(*TEXT, "--model.num-layers", "1", "--processor.vocab-size", "320", *fixture("text"))
    ],
    "classify.py": lambda fixture: [
        *(*LABELLED, *fixture("labelled"), "--data.columns.text", "review", "--data.columns.label", "label")
    ],
    "classify_pairs.py": lambda fixture: [
        *(*LABELLED, *fixture("labelled"), "--data.columns.text", "question", "--data.columns.pair", "review"),
        *("--data.columns.label", "label"),
    ],
    "tag.py": lambda fixture: [*LABELLED, *fixture("labelled")],
    "answer.py": lambda fixture: [*LABELLED, *fixture("labelled")],
}


def test_every_config_is_known_here():
    assert {path.name for path in (ROOT / "configs").glob("*.py")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_trains_for_two_steps(name, tmp_path, request, capsys):
    flags = CONFIGS[name](request.getfixturevalue)
    config = parse_config([str(ROOT / "configs" / name), *TINY, *flags, "--workdir", str(tmp_path / name)], "train.py")
    train_and_show(config)
    splits = ["valid", "test"] if len(config.data.split("test")) else ["valid"]
    lines = read_metrics(tmp_path / name / "metrics.jsonl")
    assert [(line["step"], line["split"]) for line in lines] == [(2, split) for split in splits]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert "held-out samples" in capsys.readouterr().out


def test_the_papers_settings():
    config = parse_config([str(ROOT / "configs" / "wmt14_big.py")], "train.py")
    assert (config.model.d_model, config.model.num_heads, config.model.d_ff, config.steps) == (1024, 16, 4096, 300_000)
    assert config.optimizer.warmup_steps == 4000 and config.task.label_smoothing == 0.1
    assert (config.task.decoding.num_beams, config.task.decoding.alpha) == (4, 0.6)
    assert config.workdir == Path("runs/wmt14_big")


def test_a_set_that_is_not_there_is_named(tmp_path, capsys):
    from transformer_jax.commands.errors import user_errors

    flags = ["--data.data-dir", str(tmp_path), "--workdir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop, user_errors():
        train_and_show(parse_config([str(ROOT / "configs" / "wmt14_base.py"), *flags], "train.py"))
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: wmt14_translate/de-en cannot be read from") and error.count("\n") == 1
