import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from transformer_jax.data import Column, Dates, Files, Mixture, Records, Tfds, TokenizerConfig
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.training import Config, OptimizerConfig, Run
from transformer_jax.training.lock import turn
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.serialization import from_json, to_json
from transformer_jax.training.workdir import Workdir

CONFIG = Config(model=tiny.CONFIG, data=Dates(), optimizer=OptimizerConfig(), steps=10)


@pytest.mark.parametrize(
    "data",
    [
        Dates(),
        Tfds("wmt14_translate/de-en", {"source": "en", "target": "de"}, data_dir=Path("data")),
        Files(train=(Path("a"), Path("b")), held_out=3),
        Records(train=(("a", "b"), ("c", "d"))),
        Mixture((Dates(languages=("ru",)), Files(train=(Path("x.tsv"),))), (1.0, 0.5)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_config_survives_json(data):
    config = replace(CONFIG, data=data, processor=TokenizerConfig(path=Path("tokenizer.json")), workdir=Path("w"))
    assert from_json(Config, json.loads(json.dumps(to_json(config)))) == config


def test_another_config_is_refused_at_the_first_difference(tmp_path):
    workdir = Workdir(tmp_path / "run")
    workdir.claim(CONFIG)
    workdir.claim(replace(CONFIG, steps=20, keep=5, strategy="pmap", workdir=Path("elsewhere")))
    assert workdir.config().steps == 20
    with pytest.raises(UserError, match=r"begun with model.d_ff=32 but 64 is asked for; give another --workdir"):
        workdir.claim(replace(CONFIG, model=replace(tiny.CONFIG, d_ff=64)))
    with pytest.raises(UserError, match=r'begun with data.languages=\["de", "fr", "es", "ja", "zh"\] but \["ru"\]'):
        workdir.claim(replace(CONFIG, data=Dates(languages=("ru",))))
    with pytest.raises(UserError, match=r'begun with data.type="Dates" but "Tfds" is asked for'):
        workdir.claim(replace(CONFIG, data=Tfds("x", {"source": "en", "target": "de"})))
    assert workdir.config().model == CONFIG.model


def test_folders_that_are_no_runs_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; make one with: transformer-jax train --workdir"):
        Workdir(tmp_path / "nowhere").config()
    (tmp_path / "file.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a run"):
        Workdir(tmp_path).config()
    with pytest.raises(UserError, match="exists and is not a run; give another --workdir"):
        Workdir(tmp_path).claim(CONFIG)
    assert (tmp_path / "file.txt").read_text() == "mine"
    (tmp_path / "config.json").write_text('{"type": "Config", "st')
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        Workdir(tmp_path).config()


def test_metrics_beyond_the_checkpoint_are_forgotten(tmp_path):
    workdir = Workdir(tmp_path)
    log = MetricsLog(workdir, 0)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": step / 10})
    log.write(2, "valid", {"loss": 0.5, "exact_match": 0.25})
    log.close()
    with workdir.metrics_file.open("a") as file:
        file.write('{"step": 4, "split": "tr')  # cut short by a kill
    log = MetricsLog(workdir, 2)
    log.write(3, "train", {"loss": 0.33})
    log.write(2, "valid", {"loss": 9.0})  # there already
    log.close()
    assert [(line["step"], line["split"], line["loss"]) for line in read_metrics(workdir.metrics_file)] == [
        (1, "train", 0.1),
        (2, "train", 0.2),
        (2, "valid", 0.5),
        (3, "train", 0.33),
    ]


def test_tensorboard_reads_the_same_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(Workdir(tmp_path), 0)
    log.write(5, "valid", {"loss": 0.5, "exact_match": 0.25})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("valid/exact_match")] == [(5, 0.25)]


def test_tensorboard_forgets_what_was_beyond_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step, losses in ((0, {1: 0.1, 2: 0.2, 3: 0.3}), (1, {2: 0.25})):
        log = MetricsLog(Workdir(tmp_path), step)
        for number, loss in losses.items():
            log.write(number, "train", {"loss": loss})
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 5}, "begun with seed=0 but 5 is asked for"),
        ({"model": replace(tiny.CONFIG, d_ff=64, vocab_size=None)}, "begun with model.d_ff=32 but 64 is asked for"),
        ({"model": replace(tiny.CONFIG, vocab_size=13)}, "begun with model.vocab_size=12 but 13 is asked for"),
    ],
)
def test_a_taken_workdir_is_refused_before_a_tokenizer_is_trained(tmp_path, change, difference, monkeypatch):
    workdir = Workdir(tmp_path / "run")
    workdir.claim(CONFIG)
    monkeypatch.setattr(Dates, "split", lambda *_: pytest.fail("the data were read"))
    with pytest.raises(UserError, match=difference):
        Run.begin(replace(CONFIG, workdir=workdir.path, **change))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").touch()
    with pytest.raises(UserError, match="exists and is not a run; give another --workdir"):
        Run.begin(replace(CONFIG, workdir=tmp_path / "other"))


def test_what_is_left_to_the_tokenizer_is_no_difference(tmp_path):
    workdir = Workdir(tmp_path / "run")
    workdir.claim(CONFIG)
    open_model = replace(tiny.CONFIG, vocab_size=None, pad_id=None, dtype="auto")
    workdir.check(replace(CONFIG, model=open_model, optimizer=replace(CONFIG.optimizer, total_steps=None)))


def test_what_a_killed_start_leaves_behind_does_not_keep_the_next_from_starting(tmp_path):
    (tmp_path / "run" / ".unfinished-x").mkdir(parents=True)
    (tmp_path / "run" / "lock").write_text("process 1 on here since yesterday")
    Workdir(tmp_path / "run").claim(CONFIG)
    assert Workdir(tmp_path / "run").config().steps == 10


def test_a_file_name_that_is_no_text_survives(tmp_path):
    data = Files(train=(Path("\udcff.en"), Path("ü.de")))
    Workdir(tmp_path / "run").claim(replace(CONFIG, data=data))
    assert Workdir(tmp_path / "run").config().data == data
    assert "ü.de" in (tmp_path / "run" / "config.json").read_text(encoding="utf-8")


def test_a_process_that_does_not_write_still_checks_and_remembers(tmp_path):
    workdir = Workdir(tmp_path / "run", read_only=True)
    workdir.claim(CONFIG)
    workdir.save_processor(object())
    assert not (tmp_path / "run").exists()
    Workdir(tmp_path / "run").claim(CONFIG)
    with pytest.raises(UserError, match="begun with seed=0 but 1 is asked for"):
        workdir.claim(replace(CONFIG, seed=1))
    written = MetricsLog(Workdir(tmp_path / "run"), 0)
    written.write(1, "valid", {"loss": 0.5})
    written.close()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    log = MetricsLog(workdir, 1)
    assert log.has(1, "valid") and not log.has(2, "valid")
    log.write(2, "valid", {"loss": 0.4})
    log.close()
    assert log.has(2, "valid")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_processes_take_turns(tmp_path):
    order, waits = [], threading.Event()

    def second():
        waits.set()
        with turn(tmp_path / "examples"):
            order.append("second")

    with turn(tmp_path / "examples"):
        thread = threading.Thread(target=second)
        thread.start()
        waits.wait()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_what_another_process_has_encoded_in_the_meantime_is_as_good(tmp_path):
    columns = {"tokens": Column()}

    def slow():
        Store.write(tmp_path / "train", [[{"tokens": [1, 2]}]], columns)
        yield [{"tokens": [1, 2]}]

    assert Store.write(tmp_path / "train", slow(), columns)[0]["tokens"].tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
