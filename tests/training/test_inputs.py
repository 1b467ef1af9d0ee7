"""What a run reads: worker processes, and data that are not those it was begun with."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from transformer_jax.data import Files, Mixture, Records, Text
from transformer_jax.data.source import Source
from transformer_jax.errors import UserError
from transformer_jax.training.inputs import load_or_encode
from transformer_jax.training.workdir import Workdir

READING = """
    import sys, time
    from transformer_jax.data import Batches, BatchingConfig, Rows, Store
    from transformer_jax.training.inputs import ahead_of_time

    if __name__ == "__main__":
        rows = Rows(Store.of([{"text": [1, 2, 3]}] * 64), BatchingConfig(rows=2), pad_id=0)
        batches = ahead_of_time(Batches(rows), 0, 10**9, workers=2)
        for _ in range(6):
            next(batches)
        print("reading", flush=True)
        time.sleep(600)
"""

WAITING = """
    import multiprocessing, os, sys, time
    from transformer_jax.training.inputs import end_with_parent

    def wait():
        end_with_parent(0, 1)
        print("waiting", flush=True)
        while True:
            time.sleep(0.01)

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        for _ in range(2):
            context.Process(target=wait).start()
        time.sleep(600)
"""


def killed(tmp_path, script, *arguments, ready):
    """Start a script, kill it when it has written these lines, and wait for the end of its output.

    Every process that it has started writes to the same pipe, which ends when none of them is left.
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    process = subprocess.Popen([sys.executable, path, *arguments], stdout=subprocess.PIPE, text=True)
    for line in ready:
        assert process.stdout.readline().strip() == line
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=15)
    assert process.returncode == -signal.SIGKILL


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    killed(tmp_path, READING, ready=["reading"])


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_worker_ends_with_its_parent_however_it_was_started(tmp_path, method):
    killed(tmp_path, WAITING, method, ready=["waiting", "waiting"])


class Letters:
    """A task that reads characters."""

    tokenizer = SimpleNamespace(vocab_size=2**20, warn_if_unknown=lambda rows, what, share: None)

    def __init__(self, fields):
        self.fields = fields

    def encode(self, records):
        return [{field: list(map(ord, record[field])) for field in self.fields} for record in records]


def encode(workdir, data, fields=("source", "target")):
    workdir.mkdir(exist_ok=True)
    task = Letters(fields)
    return load_or_encode(Workdir(workdir), SimpleNamespace(data=data, task=task), task)


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
