"""What a run reads: data that are not those it was begun with, and records that are no texts."""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from tests.tasks.running import tiny_bert
from transformer_jax.data import BatchingConfig, Files, Mixture, Records, Text, TokenizerConfig
from transformer_jax.data.columns import Column
from transformer_jax.data.source import Source
from transformer_jax.errors import UserError
from transformer_jax.models import BertConfig
from transformer_jax.parallel import MeshConfig
from transformer_jax.tasks import ClassificationConfig, TaggingConfig
from transformer_jax.training import Config, OptimizerConfig, train
from transformer_jax.training.examples import training_examples, validation_examples
from transformer_jax.training.workdir import Workdir


class Letters:
    """A task that reads characters, and its config."""

    word_fields = ()

    def __init__(self, fields):
        self.fields = self.text_fields = fields
        self.columns = dict.fromkeys(fields, Column())

    def encode(self, records):
        return [{field: list(map(ord, record[field])) for field in self.fields} for record in records]


def encode(workdir, data, fields=("source", "target")):
    workdir.mkdir(exist_ok=True)
    task = Letters(fields)
    return training_examples(Workdir(workdir), SimpleNamespace(data=data, task=task), task)


@pytest.fixture
def sources(tmp_path):
    """Sources of many records in files, and the path of one of their files."""
    table, text, other = tmp_path / "pairs.tsv", tmp_path / "text.txt", tmp_path / "other.tsv"
    table.write_text("".join(f"{n:04}\t{n:04}\n" for n in range(3000)))
    text.write_text("".join(f"{n:04}\n" for n in range(3000)))
    other.write_text("a\tb\n")
    return {
        "table": (Files(table), table, ("source", "target")),
        "lines": (Text(text, document="line"), text, ("text",)),
        "file": (Text(text), text, ("text",)),
        "mixture": (Mixture((Files(other), Files(table)), (1, 1)), table, ("source", "target")),
    }


@pytest.mark.parametrize("kind", ["table", "lines", "file", "mixture"])
def test_a_line_that_was_changed_anywhere_is_noticed_when_a_run_goes_on(tmp_path, sources, kind):
    data, path, fields = sources[kind]
    kept = encode(tmp_path / "run", data, fields)
    assert len(encode(tmp_path / "run", data, fields)) == len(kept)
    before, status = path.read_text(), path.stat()
    for number in (1, 1234, 2345):
        path.write_text(before.replace(f"{number:04}", "XXXX", 1))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(UserError, match=r"the training data are not those that .*run was begun with"):
            encode(tmp_path / "run", data, fields)
    path.unlink()
    path.write_text(before)  # the same data, copied anew
    assert len(encode(tmp_path / "run", data, fields)) == len(kept)


@dataclass(frozen=True)
class Own(Source):
    """A source of a user."""

    record: object

    def split(self, name):
        return [{"source": "a", "target": "b"}] * 3 + [self.record]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"source": "a", "target": 5}, r"Own, train, record 3 has 5 as 'target'; give a string"),
        ({"source": b"a", "target": "b"}, r"Own, train, record 3 has b'a' as 'source'; give a string"),
        ({"source": "a", "target": None}, r"Own, train, record 3 has None as 'target'; give a string"),
        ({"source": "\ud83d", "target": "b"}, r"Own, train, record 3 has '\\ud83d' in 'source'"),
        ({"source": "a"}, r"Own, train, record 3 has no 'target', but source; the task reads source, target"),
        (("a", "b"), r"Own, train, record 3 is \('a', 'b'\); give a dict with source, target"),
    ],
)
def test_a_record_of_any_source_that_is_no_text_is_named(tmp_path, record, message):
    with pytest.raises(UserError, match=message):
        encode(tmp_path / "run", Own(record))


def test_records_that_are_texts_are_encoded(tmp_path):
    assert len(encode(tmp_path / "run", Records([("a", "b"), ("c", "")], allow_empty=True))) == 2


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_empty_text_of_any_split_is_named_before_anything_is_trained(tmp_path, split):
    paths = {}
    for name in ("train", "valid", "test"):
        paths[name] = tmp_path / f"{name}.tsv"
        paths[name].write_text("a\tb\nc\td\n" if name != split else "a\tb\nc\t\n")
    with pytest.raises(UserError, match=rf"{split}\.tsv, line 2 has an empty target"):
        encode(tmp_path / "run", Files(**paths))
    assert len(encode(tmp_path / "run", Files(**paths, allow_empty=True))) == 2


class Counting(Letters):
    """Says how many records it was given."""

    def __init__(self, fields):
        super().__init__(fields)
        self.encoded = 0

    def encode(self, records):
        self.encoded += len(records)
        return super().encode(records)


def validation(workdir, data, task, limit=2000):
    workdir.mkdir(exist_ok=True)
    config = SimpleNamespace(data=data, task=task, evaluate_examples=limit)
    return validation_examples(Workdir(workdir), config, task)


def test_the_validation_set_is_encoded_once_and_again_when_it_changed(tmp_path):
    pairs = [(f"{n}", f"{n}!") for n in range(40)]
    task = Counting(("source", "target"))
    first = validation(tmp_path / "run", Records(train=pairs, valid=pairs), task)
    again = validation(tmp_path / "run", Records(train=pairs, valid=pairs), task)
    assert task.encoded == 40 and len(again.examples) == len(first.examples) == len(again.records) == 40
    changed = [*pairs[:7], ("seven", "7!"), *pairs[8:]]
    found = validation(tmp_path / "run", Records(train=pairs, valid=changed), task)
    assert task.encoded == 80 and found.examples[7]["source"].tolist() == list(map(ord, "seven"))
    assert len(list((tmp_path / "run" / "examples" / "valid").iterdir())) == 1  # the old one is gone


@pytest.mark.parametrize(
    ("limit", "numbers"), [(4, [0, 10, 20, 30]), (3, [0, 13, 26]), (40, range(40)), (99, range(40))]
)
def test_so_many_validation_examples_are_evenly_spaced(tmp_path, limit, numbers):
    pairs, task = [(f"{n}", f"{n}!") for n in range(40)], Counting(("source", "target"))
    found = validation(tmp_path / "run", Records(train=pairs, valid=pairs), task, limit)
    assert [record["source"] for record in found.records] == list(map(str, numbers))
    assert task.encoded == len(found.examples) == len(numbers)
    # Another limit is another set, which is not taken for this one.
    more = validation(tmp_path / "run", Records(train=pairs, valid=pairs), task, 5)
    assert len(more.examples) == len(more.records) == 5


def test_any_validation_record_that_changed_is_noticed(tmp_path):
    pairs, task = [(f"{n}", f"{n}!") for n in range(1500)], Counting(("source", "target"))
    validation(tmp_path / "run", Records(train=pairs, valid=pairs), task)
    other = [pairs[0], ("one", "1!"), *pairs[2:]]
    found = validation(tmp_path / "run", Records(train=pairs, valid=other), task)
    assert found.examples[1]["source"].tolist() == list(map(ord, "one"))


@dataclass(frozen=True)
class Sentences(Source):
    """Four words, each with a tag."""

    def split(self, name):
        return [{"text": "a b c d", "tags": "O O O X"}] * 30

    def fields(self):
        return ("text", "tags")


def test_only_tokens_are_counted_among_those_that_are_unknown(tmp_path, recwarn):
    """And not the number of a word that happens to be the id of the unknown token."""
    data = Sentences()
    task, _ = tiny_bert(TaggingConfig(), data.split("train"))
    assert task.tokenizer.unknown_id < 4
    training_examples(Workdir(tmp_path), SimpleNamespace(data=data, task=TaggingConfig()), task)
    assert not recwarn.list


def test_what_a_link_in_the_folder_points_to_is_left_alone(tmp_path):
    data = Records(train=[("a", "b")] * 3, valid=[("a", "b")] * 3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (tmp_path / "run" / "examples" / "valid").mkdir(parents=True)
    (tmp_path / "run" / "examples" / "valid" / "old").symlink_to(tmp_path / "elsewhere")
    validation(tmp_path / "run", data, Letters(("source", "target")))
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"


def test_a_record_that_a_task_cannot_encode_is_named_with_its_line(tmp_path):
    (tmp_path / "a.tsv").write_text("abc\tyes\nab\tno\n" * 30)
    (tmp_path / "b.tsv").write_text("abc\tyes\nab\tmaybe\n")
    config = Config(
        model=replace(
            BertConfig.base(None, pad_id=None), d_model=16, num_heads=2, d_ff=24, num_layers=1, max_length=12
        ),
        data=Files(train=tmp_path / "a.tsv", test=tmp_path / "b.tsv", columns={"text": "", "label": ""}),
        task=ClassificationConfig(),
        processor=TokenizerConfig(kind="characters"),
        batching=BatchingConfig(rows=4),
        optimizer=OptimizerConfig(schedule="linear"),
        steps=2,
        mesh=MeshConfig(data=1),
        workdir=tmp_path / "run",
    )
    with pytest.raises(UserError, match=r"b\.tsv, line 2.*the label 'maybe' is unknown"):
        train(config)
    assert not (tmp_path / "run" / "checkpoints" / "2").exists()
