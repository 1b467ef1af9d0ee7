"""Workdirs in buckets. The bucket is in memory, and read and written through epath and fsspec as a real one is."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem
from orbax.checkpoint._src.path import gcs_utils

import transformer_jax.atomic
from tests import tiny
from transformer_jax.atomic import PREFIX, as_path, atomic, is_remote
from transformer_jax.commands.parsing import parse
from transformer_jax.data import Dates
from transformer_jax.errors import UserError
from transformer_jax.tasks import TranslationConfig
from transformer_jax.training import Config
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.examples import training_examples
from transformer_jax.training.lock import locked
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.resolve import resolve_new
from transformer_jax.training.saved import saved_step
from transformer_jax.training.serialization import from_json, to_json
from transformer_jax.training.workdir import Workdir

CONFIG = Config(model=tiny.CONFIG, data=Dates(train_size=20, valid_size=2, test_size=2), steps=10)


class Bucket(MemoryFileSystem):
    """Objects by name, which are written whole and cannot be appended to."""

    protocol = ("gs", "gcs")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("gs://"))

    def _open(self, path, mode="rb", **settings):
        if mode not in ("rb", "wb"):
            raise NotImplementedError(f"a bucket has no mode {mode}")
        return super()._open(path, mode, **settings)


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(transformer_jax.atomic, "PACKAGE", "fsspec")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)  # which would be used where it is
    monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", lambda *_: Bucket())
    return as_path("gs://bucket/runs")


def names(bucket):
    return {name.removeprefix("/bucket/runs/") for name in MemoryFileSystem.store}


@pytest.mark.parametrize("text", ["gs://bucket/a/b", Path("gs://bucket/a/b"), "gs:/bucket/a/b"])
def test_the_whole_address_is_kept(bucket, text):
    path = as_path(text)
    assert is_remote(path) and str(path) == "gs://bucket/a/b" and str(path / "c") == "gs://bucket/a/b/c"
    assert str(Workdir(text).checkpoints) == "gs://bucket/a/b/checkpoints"
    assert str(Workdir.of(replace(CONFIG, workdir=text)).path) == "gs://bucket/a/b"


@pytest.mark.parametrize("text", ["a/b", "/a//b", "c:/a", "gs:", "gs:/", "runs/gs://x", "ftp://x/y"])
def test_other_paths_are_those_of_pathlib(text):
    assert as_path(text) == Path(text) and type(as_path(text)) is type(Path(text)) and not is_remote(as_path(text))


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(transformer_jax.atomic, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'gs://b/c needs the package gcsfs: pip install ".*\[remote\]"'):
        as_path(Path("gs://b/c"))


def test_buckets_that_checkpoints_cannot_be_written_to_are_refused():
    with pytest.raises(UserError, match=r"s3://b/c: checkpoints can be written to folders and to gs:// only; mount"):
        Workdir(Path("s3://b/c"))


def test_a_flag_and_a_config_name_a_bucket(bucket):
    default = replace(CONFIG, workdir="gs://bucket/x")
    given = parse(Config, ["--workdir", "gs://bucket/y"], prog="train", default=default)
    assert str(Workdir.of(given).path) == "gs://bucket/y"
    kept = from_json(Config, json.loads(json.dumps(to_json(default))))
    assert kept == default and str(Workdir.of(kept).path) == "gs://bucket/x"


def test_a_file_is_there_whole_or_not_at_all(bucket, monkeypatch):
    with atomic(bucket / "a.json") as unfinished:
        unfinished.write_text("old")
        assert names(bucket) == set()
    assert (bucket / "a.json").read_text() == "old"
    with pytest.raises(TypeError), atomic(bucket / "a.json") as unfinished, unfinished.open("w") as file:
        file.writelines(["half", 0])
    assert (bucket / "a.json").read_text() == "old"
    cut_short(monkeypatch)
    with pytest.raises(ConnectionError), atomic(bucket / "a.json") as unfinished:
        unfinished.write_text("new")
    assert (bucket / "a.json").read_text() == "old" and names(bucket) == {"a.json"}


def cut_short(monkeypatch):
    """The connection is lost after some bytes, and what was sent is kept."""
    whole_open = Bucket._open

    def half_open(self, path, mode="rb", **settings):
        if mode == "wb":
            with whole_open(self, path, mode, **settings) as file:
                file.write(b"n")
            raise ConnectionError("lost")
        return whole_open(self, path, mode, **settings)

    monkeypatch.setattr(Bucket, "_open", half_open)


def test_a_config_is_claimed_and_another_refused(bucket):
    workdir = Workdir(bucket / "run")
    with pytest.raises(UserError, match=r"workdir gs://bucket/runs/run does not exist"):
        workdir.config()
    workdir.claim(CONFIG)
    workdir.claim(replace(CONFIG, steps=20))
    assert workdir.is_run() and workdir.config() == replace(CONFIG, steps=20)
    with pytest.raises(UserError, match="gs://bucket/runs/run was begun with seed=0 but 1 is asked for"):
        workdir.claim(replace(CONFIG, seed=1))
    (bucket / "other" / "file").write_text("mine")
    with pytest.raises(UserError, match="gs://bucket/runs/other exists and is not a run"):
        Workdir(bucket / "other").claim(CONFIG)
    assert not any(PREFIX in name for name in names(bucket))


def test_what_only_reads_writes_nothing(bucket):
    workdir = Workdir(bucket / "run", read_only=True)
    workdir.claim(CONFIG)
    log = MetricsLog(workdir, 0)
    log.write(1, "train", {"loss": 0.5})
    assert log.has(1, "train") and not log.has(1, "valid")
    log.close()
    assert names(bucket) == set()


def test_there_is_a_note_that_it_cannot_be_locked(bucket, capsys):
    with locked(bucket / "run"), locked(bucket / "run"):
        pass
    note = "note: gs://bucket/runs/run cannot be locked (a bucket has no locks); start no second training in it\n"
    assert capsys.readouterr().err == 2 * note and names(bucket) == set()


def test_metrics_are_rewritten_where_nothing_can_be_appended(bucket):
    workdir = Workdir(bucket / "run")
    log = MetricsLog(workdir, 0)
    for step in (1, 2):
        log.write(step, "train", {"loss": step / 10})
    assert read_metrics(workdir.metrics_file) == []
    log.write(2, "valid", {"loss": 0.5})
    assert len(read_metrics(workdir.metrics_file)) == 3
    log.write(3, "train", {"loss": 0.3})
    log.close()
    log = MetricsLog(workdir, 2)
    log.write(3, "train", {"loss": 0.33})
    log.close()
    found = [(line["step"], line["split"], line["loss"]) for line in read_metrics(workdir.metrics_file)]
    assert found == [(1, "train", 0.1), (2, "train", 0.2), (2, "valid", 0.5), (3, "train", 0.33)]


def test_tensorboard_reads_what_was_copied(bucket, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(Workdir(bucket / "run"), 0)
    log.write(5, "valid", {"exact_match": 0.25})
    log.close()
    for path in Workdir(bucket / "run").tensorboard.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("valid/exact_match")] == [(5, 0.25)]


def test_a_tokenizer_comes_back(bucket):
    config, tokenizer = resolve_new(replace(CONFIG, model=replace(tiny.CONFIG, vocab_size=None, pad_id=None)), None)
    workdir = Workdir(bucket / "run")
    workdir.claim(config)
    workdir.save_processor(tokenizer)
    assert "run/tokenizer.json" in names(bucket)
    assert workdir.load_processor(config.processor).fingerprint == tokenizer.fingerprint


def test_examples_are_kept_on_this_machine_for_this_run(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, tokenizer = resolve_new(replace(CONFIG, model=replace(tiny.CONFIG, vocab_size=None, pad_id=None)), None)
    task = TranslationConfig().build(tokenizer, config.model, config.batching)
    workdir = Workdir(bucket / "run")
    workdir.claim(config)
    store = training_examples(workdir, config, task)
    assert workdir.examples.is_relative_to(tmp_path) and len(store) == 20
    assert {"run/config.json", "run/examples.sha256"} <= names(bucket)
    assert len(pickle.loads(pickle.dumps(store))) == 20  # as a worker process opens it
    monkeypatch.setattr(type(task), "encode", lambda *_: pytest.fail("encoded again"))
    assert len(training_examples(workdir, config, task)) == 20
    before = workdir.examples
    for path in workdir.path.iterdir():
        path.unlink()
    workdir.claim(config)
    assert workdir.examples != before  # of another run that has the same name


def test_a_checkpoint_in_a_bucket_counts_when_it_is_committed(bucket, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save_model({"w": 1.0}, 3)
    checkpoints.close()
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)  # which Google is asked
    remote = bucket / "run" / "checkpoints"
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            (remote / path.relative_to(tmp_path / "checkpoints")).write_bytes(path.read_bytes())
    (remote / "4" / "model" / "_METADATA").write_text("{}")  # of a save that was cut short
    assert saved_step(remote) == 3
    assert Checkpoints(remote, read_only=True).steps() == [3]
