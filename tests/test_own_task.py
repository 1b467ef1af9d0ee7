"""A task, a model and a source of one's own, in one file outside of the package."""

import io
import json
import shutil
import sys
import textwrap

import jax
import numpy as np
import pytest

from transformer_jax.__main__ import _main as main
from transformer_jax.commands.train import parse_config
from transformer_jax.data import Datasets
from transformer_jax.errors import UserError
from transformer_jax.training import Run, train
from transformer_jax.training.metrics import read_metrics

FILE = '''
    """Which of two classes a point of the plane is in, by a logistic regression."""

    from dataclasses import dataclass
    from pathlib import Path
    from typing import ClassVar

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from transformer_jax.data import BatchingConfig, Source
    from transformer_jax.data.columns import Column
    from transformer_jax.functional import cross_entropy
    from transformer_jax.models import ModelConfig
    from transformer_jax.tasks import BestCheckpoint, Task, TaskConfig
    from transformer_jax.training import Config, OptimizerConfig


    @dataclass(frozen=True)
    class Points(Source):
        slope: float = 0.5
        count: int = 40

        def split(self, name):
            first = {"train": 0, "valid": 1000, "test": 2000}[name]
            xs = [((7 * n) % 11 - 5.0, (5 * n) % 13 - 6.0) for n in range(first, first + self.count)]
            return [{"point": x, "side": int(x[1] > self.slope * x[0])} for x in xs]

        def fields(self):
            return ("point", "side")


    class Regression(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jax.random.normal(rngs.params(), (2, 2)))

        def __call__(self, x):
            return x @ self.weight[...]


    @dataclass(frozen=True)
    class RegressionConfig(ModelConfig):
        def build(self, rngs):
            return Regression(rngs)


    @dataclass(frozen=True)
    class Decoding:
        loud: bool = False
        """Write in capitals."""


    @dataclass(frozen=True)
    class SidesConfig(TaskConfig):
        decoding: Decoding = Decoding()

        fields: ClassVar = ("point", "side")
        models: ClassVar = (RegressionConfig,)

        def build(self, processor, model, batching):
            return Sides(self, batching)


    @dataclass(frozen=True)
    class Sides(Task):
        config: SidesConfig
        batching: BatchingConfig

        unit: ClassVar = "points"
        best: ClassVar = BestCheckpoint("right", "highest")

        @property
        def columns(self):
            one = Column("float32", ragged=False)
            return {"point": Column("float32", shape=(2,), ragged=False), "side": Column(ragged=False), "is_row": one}

        def encode(self, records):
            return [{"point": record["point"], "side": record.get("side", 0), "is_row": 1.0} for record in records]

        def loss(self, model, batch, key):
            return cross_entropy(model(batch["point"]), batch["side"], batch["is_row"])

        def predict(self, model, batch):
            return {"side": jnp.argmax(model(batch["point"]), axis=-1)}

        def score(self, results):
            pairs = zip(results.predictions["side"], results.records, strict=True)
            return {"right": sum(int(side) == record["side"] for side, record in pairs) / len(results.records)}

        def problems(self, texts):
            return [None if len(text.split()) == 2 else "is not two numbers" for text in texts]

        def write(self, texts, predictor):
            examples = self.encode([{"point": tuple(map(float, text.split()))} for text in texts])
            names = ["BELOW", "ABOVE"] if self.config.decoding.loud else ["below", "above"]
            return [names[int(side)] for side in predictor.over(Sides.predict, examples)["side"]]


    config = Config(
        model=RegressionConfig(),
        data=Points(),
        task=SidesConfig(),
        processor=None,
        batching=BatchingConfig(rows=8),
        optimizer=OptimizerConfig(schedule="linear", peak=0.1, warmup_steps=1, total_steps=40),
        steps=20,
        log_every=1,
        evaluate_every=10,
        strategy="jit",
    )
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "sides_of_points.py"
    path.write_text(textwrap.dedent(FILE))
    return path


@pytest.fixture(scope="module")
def whole(file):
    """A run that was never stopped."""
    return train(parse_config([str(file), "--workdir", str(file.parent / "whole")], "train.py"))


@pytest.fixture
def forgotten():
    """As in a new process, which has not run the file."""
    module = sys.modules.pop("sides_of_points", None)
    yield
    if module is not None:
        sys.modules["sides_of_points"] = module


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["transformer_jax", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def test_it_learns_and_is_evaluated(whole):
    run, _ = whole
    lines = read_metrics(run.workdir.metrics_file)
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert lines[-1]["split"] == "test" and lines[-1]["right"] > 0.9
    assert lines[0]["points"] == 8 and "points_per_second" in lines[0]


def test_stopped_and_resumed_by_the_files_path_it_is_the_same_bit_for_bit(file, whole):
    def to(steps):
        flags = ["--workdir", str(file.parent / "cut"), "--steps", str(steps), "--workers", "1" if steps == 7 else "0"]
        return train(parse_config([str(file), *flags], "train.py"))[1]

    to(7)
    resumed = to(20)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole[1]), strict=True):
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def test_the_best_checkpoint_is_kept_by_the_tasks_own_metric(file, whole, monkeypatch):
    scores = iter([0.1, 0.9, 0.3, 0.2, 0.0])
    flags = ["--workdir", str(file.parent / "best"), "--keep", "1", "--evaluate-every", "5"]
    config = parse_config([str(file), *flags], "train.py")
    monkeypatch.setattr(sys.modules["sides_of_points"].Sides, "score", lambda *_: {"right": next(scores)})
    run, _ = train(config)
    with run.checkpoints() as checkpoints:
        assert checkpoints.steps() == [10, 20]


def test_its_settings_are_flags(file):
    config = parse_config([str(file), "--data.slope", "2", "--task.decoding.loud", "--steps", "3"], "train.py")
    assert (config.data.slope, config.task.decoding.loud, config.steps) == (2.0, True, 3)
    assert config.workdir.name == "sides_of_points"


def test_a_run_is_used_with_the_file_that_defines_it(file, whole, command, forgotten):
    workdir = whole[0].workdir.path
    code, out, err = command("evaluate", workdir, "--config", file)
    assert (code, err) == (0, "")
    (expected,) = [line for line in read_metrics(workdir / "metrics.jsonl") if line["split"] == "test"]
    assert json.loads(out) == {**expected, "examples": 40}
    code, out, err = command("evaluate", workdir, "--config", file, "--data.count", "12", "--split", "valid")
    assert code == 0 and json.loads(out)["examples"] == 12, err
    code, out, err = command("generate", workdir, "--config", file, stdin="0 6\n0 -6\n")
    assert (code, out) == (0, "above\nbelow\n"), err
    code, out, _ = command("generate", workdir, "--loud", "--config", file, stdin="0 6\n")
    assert (code, out) == (0, "ABOVE\n")
    code, _, err = command("generate", workdir, "--config", file, stdin="0 6\n1\n")
    assert (code, err) == (1, "error: line 2 is not two numbers; the lines before it were done\n")


def test_what_the_task_cannot_do_is_named(file, whole, command):
    code, _, err = command("attention", whole[0].workdir.path, "0 6", "--config", file)
    assert (code, err) == (
        1,
        "error: a run of Sides cannot give attention maps: the task has no ability GivesAttention\n",
    )


def test_without_the_file_the_error_says_how(whole, command, forgotten):
    code, out, err = command("evaluate", whole[0].workdir.path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "not part of this package but of the module sides_of_points" in err
    assert "--config sides_of_points.py" in err


def test_a_file_that_is_not_there_is_named(whole, command):
    code, _, err = command("evaluate", whole[0].workdir.path, "--config", "nowhere.py")
    assert (code, err) == (1, "error: config file nowhere.py does not exist\n")


def test_the_file_is_found_however_the_flags_are_written(file, whole, command, forgotten):
    workdir = whole[0].workdir.path
    code, out, err = command("evaluate", "--split", "valid", workdir, "--data.count", "12", f"--config={file}")
    assert code == 0 and json.loads(out)["examples"] == 12, err


def test_what_a_run_says_of_downloads_is_not_believed(whole, tmp_path, monkeypatch):
    """Nor are its data looked for before somebody asks for them."""
    monkeypatch.setattr(Datasets, "_splits", property(lambda self: pytest.fail("the data were looked for")))
    copy = tampered(whole, tmp_path, "data", type="Datasets", path="some/set", download=True)
    assert Run.open(copy).config.data == Datasets("some/set", download=False)


@pytest.mark.parametrize(
    "text", ["[]", "1", "{}", '{"type": "Config"}', "[" * 100_000, '{"type": "Config", "steps": "x"}', "\xff"]
)
def test_a_config_that_is_none_is_one_clear_error(whole, tmp_path, text):
    copy = shutil.copytree(whole[0].workdir.path, tmp_path / "run")
    (copy / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        Run.open(copy)


def tampered(whole, folder, part, **fields):
    """A copy of the run whose config.json names another type."""
    copy = shutil.copytree(whole[0].workdir.path, folder / "run")
    config = json.loads((copy / "config.json").read_text())
    config[part] = fields
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    "name", ["os.system", "os:system", "subprocess:Popen", "builtins:eval", "pathlib:Path", "Config", "Run"]
)
@pytest.mark.parametrize("part", ["data", "task", "model"])
def test_nothing_that_a_runs_folder_names_is_called(whole, tmp_path, name, part):
    copy = tampered(whole, tmp_path, part, type=name, command=f"touch {tmp_path / 'called'}")
    with pytest.raises(UserError, match=f"the config has a {name} where"):
        Run.open(copy)
    assert not (tmp_path / "called").exists()


def test_a_dataclass_of_another_kind_is_refused(whole, tmp_path):
    with pytest.raises(UserError, match="the config has a OptimizerConfig where TaskConfig was expected"):
        Run.open(tampered(whole, tmp_path, "task", type="OptimizerConfig"))
    copy = tampered(whole, tmp_path / "other", "task", type="sides_of_points.Points")
    with pytest.raises(UserError, match=r"the config has a sides_of_points\.Points where TaskConfig was expected"):
        Run.open(copy)


def test_no_module_is_imported_and_no_file_of_the_folder_is_run(whole, tmp_path, monkeypatch):
    copy = tampered(whole, tmp_path, "task", type="evil:EvilConfig")
    for place in (tmp_path, copy):
        (place / "evil.py").write_text(f"open({str(tmp_path / 'called')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(copy)
    with pytest.raises(UserError, match="not part of this package but of the module evil"):
        Run.open(copy)
    assert "evil" not in sys.modules and not (tmp_path / "called").exists()
