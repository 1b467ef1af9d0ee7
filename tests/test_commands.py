"""The commands as a user types them, on a run trained for a few steps."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

import transformer_jax
from transformer_jax.__main__ import _main as main
from transformer_jax.commands.errors import user_errors
from transformer_jax.commands.train import parse_config, train_and_show
from transformer_jax.tasks import Predictor

ROOT = Path(__file__).parent.parent
TINY = [
    *("--model.d-model", "16", "--model.num-heads", "2"),
    *("--model.d-ff", "32", "--model.num-encoder-layers", "2"),
    *("--model.num-decoder-layers", "2", "--data.train-size", "200"),
    *("--data.valid-size", "5", "--data.test-size", "7"),
    *("--batching.tokens", "256", "--batching.num-buckets", "2"),
    *("--steps", "2", "--evaluate-every", "2"),
    *("--log-every", "1", "--strategy", "jit"),
]


def run_training(*flags):
    with user_errors():
        train_and_show(parse_config(list(flags), "train.py"))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "dates"
    run_training(*TINY, "--workdir", str(path))
    return path


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
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_a_run_leaves_what_it_promises(workdir):
    names = {path.name for path in workdir.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tokenizer.json", "tensorboard", "attention.png"} <= names
    config = json.loads((workdir / "config.json").read_text())
    assert config["model"]["vocab_size"] > 100 and config["model"]["dtype"] == "float32"
    assert (workdir / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_again_trains_nothing_and_adds_nothing(workdir, capsys):
    before = (workdir / "metrics.jsonl").read_text()
    run_training(*TINY, "--workdir", str(workdir))
    assert (workdir / "metrics.jsonl").read_text() == before
    assert "held-out samples" in capsys.readouterr().out


def test_an_evaluation_that_was_cut_short_is_made_up_for(workdir, tmp_path):
    copy = shutil.copytree(workdir, tmp_path / "run")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"train"' in line))
    run_training(*TINY, "--workdir", str(copy))
    assert (copy / "metrics.jsonl").read_text() == "".join(lines)


def test_evaluate_prints_the_metrics_of_the_run(workdir, command):
    code, out, _ = command("evaluate", workdir)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    (expected,) = [line for line in lines if line["split"] == "test"]
    metrics = json.loads(out)
    assert code == 0
    assert metrics == {**expected, "examples": 7}


def test_generate_gives_one_line_for_each(workdir, command):
    lines = ["March 4, 2025", "<ja> 3:04 PM", "в других письменах", "5 km", "a\u2028b\x85c"]
    code, out, err = command("generate", workdir, stdin="\n".join(lines) + "\n")
    assert code == 0, err
    assert len(out.removesuffix("\n").split("\n")) == 5
    _, japanese, _ = command("generate", workdir, "--prefix", "<ja>", stdin="3:04 PM\n")
    assert japanese == out.split("\n")[1] + "\n"


def test_generate_in_small_batches_and_with_beams_gives_the_same_lines(workdir, command):
    stdin = "\n".join(f"{n} km" for n in range(1, 8))
    _, whole, _ = command("generate", workdir, stdin=stdin)
    _, pieces, _ = command("generate", workdir, "--batch-lines", "3", stdin=stdin)
    assert whole == pieces
    code, beams, _ = command("generate", workdir, "--num-beams", "3", stdin=stdin)
    assert code == 0 and beams.count("\n") == 7


def test_nothing_in_gives_nothing_out(workdir, command):
    assert command("generate", workdir, stdin="")[:2] == (0, "")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_attention_draws_a_picture(workdir, command, tmp_path, suffix):
    path = tmp_path / "new" / f"attention.{suffix}"
    code, _, err = command("attention", workdir, "Tuesday, March 4, 2025", "--out", path, "--layer", "0")
    assert code == 0 and f"wrote {path}" in err
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(magic)


def test_doctor_names_versions_and_devices(command):
    code, out, _ = command("doctor")
    assert code == 0
    assert "jax 0." in out and "cpu:0" in out and "all that is required is here" in out


def test_a_run_of_a_mesh_is_used_on_the_devices_that_there_are(workdir, command, tmp_path):
    sharded = shutil.copytree(workdir, tmp_path / "sharded")
    config = json.loads((sharded / "config.json").read_text())
    config["mesh"] |= {"fsdp": 16, "tensor": 16}  # which are more devices than there are
    (sharded / "config.json").write_text(json.dumps(config))
    assert command("generate", str(sharded), stdin="<de> Tuesday\n") == command(
        "generate", str(workdir), stdin="<de> Tuesday\n"
    )


def test_the_mean_of_checkpoints_is_a_run_of_its_own(workdir, command, tmp_path, capsys):
    import jax
    import numpy as np

    from transformer_jax.training import Run

    longer = shutil.copytree(workdir, tmp_path / "longer")
    run_training(*TINY, "--steps", "4", "--workdir", str(longer))
    capsys.readouterr()
    assert command("checkpoints", "list", longer)[1] == "2\n4\n"
    code, out, _ = command("checkpoints", "average", longer, tmp_path / "mean", "--last", "2")
    assert (code, out) == (0, f"{tmp_path / 'mean'} is the mean of the steps 2, 4\n")
    mean, first, last = (
        jax.tree.leaves(Run.open(path).restored_model(step)[0])
        for path, step in ((tmp_path / "mean", None), (longer, 2), (longer, 4))
    )
    for m, a, b in zip(mean, first, last, strict=True):
        np.testing.assert_allclose(m, (np.asarray(a, np.float64) + np.asarray(b, np.float64)) / 2, rtol=1e-6)
    assert any(not np.array_equal(a, b) for a, b in zip(first, last, strict=True))
    code, out, _ = command("evaluate", tmp_path / "mean")
    assert code == 0 and json.loads(out)["step"] == 4
    code, _, err = command("checkpoints", "average", longer, tmp_path / "mean")
    assert code == 1 and "mean exists already; give another folder" in err


def test_changed_data_are_noticed(tmp_path, capsys):
    pair = [tmp_path / "a", tmp_path / "b"]
    for path in pair:
        path.write_text("".join(f"{n} words\n" for n in range(9)))
    config = str(ROOT / "configs" / "translate_files.py")
    flags = [config, "--data.train", *map(str, pair), "--model.d-model", "16", "--model.num-heads", "2"]
    flags += ["--model.d-ff", "16", "--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"]
    flags += ["--processor.vocab-size", "300", "--task.decoding.num-beams", "1", "--steps", "1", "--strategy", "jit"]
    flags += ["--workdir", str(tmp_path / "run")]
    run_training(*flags)
    pair[1].write_text("".join(f"{n} other words\n" for n in range(9)))
    with pytest.raises(SystemExit):
        run_training(*flags, "--steps", "2")
    assert "the training data are not those that" in capsys.readouterr().err


def mistakes(workdir):
    missing = str(workdir.parent / "missing")
    return {
        ("evaluate", missing): f"error: workdir {missing} does not exist; make one with",
        ("evaluate", str(workdir), "--step", "99"): "has no checkpoint of step 99; there are: 2",
        ("attention", str(workdir), " "): "error: the text is empty",
        ("attention", str(workdir), "x", "--out", "x.html"): 'error: cannot write a figure as ".html" (x.html)',
        ("attention", str(workdir), "x", "--layer", "2"): "error: layer=2 is not one of the model's 2 (0 to 1)",
        ("attention", str(workdir), "x" * 999): "tokens; the model reads at most 128",
        ("generate", str(workdir), "--num-beams", "0"): "error: num_beams must be at least 1; got 0",
        ("evaluate", str(workdir), "--examples", "0"): "error: examples must be at least 1; got 0",
        ("train", "dates", "--optimizer.layer-decay", "2"): "error: layer_decay must be over 0 and at most 1; got 2.0",
        ("train", "dates", "--task.decoding.num-beams", "0"): "error: num_beams must be at least 1; got 0",
        ("train", "classify", "--steps", "0"): "error: steps must be at least 1; got 0",
    }


@pytest.mark.parametrize("number", range(11))
def test_mistakes_give_one_clear_line(workdir, command, number):
    arguments, message = list(mistakes(workdir).items())[number]
    code, out, err = command(*arguments)
    assert code == 1 and out == ""
    assert message in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "fault"), [("", "is empty"), ("é" * 200, "has 203 tokens; the model reads at most 128")]
)
def test_a_line_that_cannot_be_is_named_and_nothing_before_it_is_lost(workdir, command, line, fault):
    code, out, err = command("generate", workdir, stdin=f"5 km\n6 km\n{line}\n7 km\n")
    assert code == 1
    assert out.count("\n") == 2
    assert err.strip() == f"error: line 3 {fault}; the lines before it were done"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.num-heads", "3"], "num_heads=3 does not divide d_model=128; set num_heads to a divisor such as 2"),
        (["--data.languages", "xx"], "languages has 'xx', no CLDR locale"),
        (["--steps", "0"], "steps must be at least 1; got 0"),
        (["nowhere.py"], "config file nowhere.py does not exist"),
        (["train.py"], "defines no `config = Config(...)`"),
    ],
)
def test_impossible_settings_give_one_clear_line(flags, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        run_training(*flags)
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "nearest"), [("--model.num-head", "--model.num-heads"), ("--optimizer.warmup", "--optimizer.warmup-steps")]
)
def test_an_unknown_flag_suggests_the_nearest(flag, nearest, capsys):
    with pytest.raises(SystemExit) as stop:
        run_training(flag, "4")
    assert stop.value.code == 2
    assert nearest in capsys.readouterr().err


def test_evaluate_takes_so_many_examples_and_other_settings(workdir, command):
    code, out, err = command("evaluate", workdir, "--examples", "3", "--num-beams", "1", "--data.test-size", "5")
    assert code == 0 and json.loads(out)["examples"] == 3, err
    code, out, err = command("evaluate", workdir, "--split", "valid", "--data.valid-size", "2")
    assert code == 0 and (json.loads(out)["examples"], json.loads(out)["split"]) == (2, "valid"), err


def test_the_validation_set_is_evaluated_on_in_part_and_the_test_set_whole(workdir, tmp_path, monkeypatch):
    counts = []
    evaluate = Predictor.evaluate

    def counted(self, records, *, examples, limit):
        counts.append((len(examples), len(records), limit))
        return evaluate(self, records, examples=examples, limit=limit)

    monkeypatch.setattr(Predictor, "evaluate", counted)
    run_training(*TINY, "--evaluate-examples", "2", "--workdir", str(tmp_path / "run"))
    assert counts == [(2, 2, 2), (7, 7, None)]


def test_a_config_is_found_by_its_name_or_its_path(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_name, by_path = (parse_config([name], "x") for name in ("dates", str(ROOT / "configs" / "dates.py")))
    assert by_name == by_path == parse_config([], "x") and by_name.workdir == Path("runs/dates")
    code, out, err = command("train", "date")
    assert (code, out, err) == (1, "", "error: there is no config 'date'; did you mean dates?\n")
    code, _, err = command("train", "zzz")
    assert code == 1 and err.startswith("error: there is no config 'zzz'; give the path of a file, or one of answer, ")
    code, _, err = command("train", "configs/zzz.py")
    assert (code, err) == (1, "error: config file configs/zzz.py does not exist\n")


def test_an_unknown_command_suggests_the_nearest(command):
    prog = "transformer_jax"
    assert command("evalute")[::2] == (1, f"error: 'evalute' is not a command of {prog}; did you mean evaluate?\n")
    code, _, err = command("zzz")
    assert code == 1 and err.startswith(f"error: 'zzz' is not a command of {prog}; use one of train, evaluate, ")
    code, _, err = command("checkpoints", "lst")
    assert (code, err) == (1, f"error: 'lst' is not a command of {prog} checkpoints; did you mean list?\n")
    code, out, _ = command("--help")
    assert code == 0 and all(f"\n  {name} " in out for name in ("train", "generate", "convert", "doctor"))
    assert command()[:2] == (code, out)


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "attention", "convert", "checkpoints", "doctor"])
def test_every_command_explains_itself(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0 and "usage: transformer_jax " + name in out


def test_another_config_in_the_same_workdir_is_refused(workdir, capsys):
    with pytest.raises(SystemExit):
        run_training(*TINY, "--model.d-ff", "64", "--workdir", str(workdir))
    assert "was begun with model.d_ff=32 but 64 is asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.d-model", "64"], "--model.d-model has no effect with --init-from"),
        (["--processor.kind", "bytes"], "--processor.kind has no effect with --init-from"),
        (["--model.num-labels", "3"], "--model.num-labels has no effect: ClassificationConfig sets it"),
    ],
)
def test_a_flag_that_would_change_nothing_is_an_error(command, flags, message):
    code, _, err = command("train", "classify", "--init-from", "bert", *flags)
    assert code == 1 and message in err and err.count("\n") == 1


def test_flags_that_change_no_weight_go_with_a_checkpoint():
    flags = [
        "--init-from",
        "bert",
        "--model.dropout-rate",
        "0.2",
        "--processor.path",
        "x.json",
        "--processor.pad",
        "[P]",
    ]
    config = parse_config(["classify", *flags], "train.py")
    assert config.model.dropout_rate == 0.2 and config.processor.pad == "[P]"


def test_the_version_is_told(command):
    code, out, _ = command("--version")
    assert (code, out) == (0, f"transformer_jax {transformer_jax.__version__}\n")


def test_parameters_are_read_in_the_type_that_is_asked_for(workdir, command):
    losses = [json.loads(command("evaluate", workdir, *flags)[1])["loss"] for flags in ((), ("--dtype", "bfloat16"))]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
