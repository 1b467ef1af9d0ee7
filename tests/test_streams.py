"""Commands with every kind of standard input, output and error, and with files that cannot be written."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_commands import TINY
from transformer_jax.__main__ import _main as main
from transformer_jax.commands.errors import user_errors
from transformer_jax.commands.streams import argument_text
from transformer_jax.commands.train import parse_config
from transformer_jax.errors import UserError
from transformer_jax.training import Run
from transformer_jax.training.checkpoints import Checkpoints

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose model was never trained."""
    run = Run.begin(parse_config([*TINY, "--workdir", str(tmp_path_factory.mktemp("runs") / "dates")], "train.py"))
    checkpoints = Checkpoints(run.workdir.checkpoints)
    checkpoints.save(run.initial_state())
    checkpoints.close()
    return run.workdir.path


def shell(command, stdin=b"", **environment):
    """The command as a shell runs it, which can close and redirect what it likes: code, output, lines of error."""
    done = subprocess.run(
        ["bash", "-c", command.replace("PROGRAM", f"{sys.executable} -m transformer_jax")],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **environment},
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr.decode().splitlines()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe", "byte 1 of the line, 0xff, is not UTF-8"),
        ("für".encode("latin-1"), "byte 2 of the line, 0xfc, is not UTF-8"),
        ("für".encode()[:2], "byte 2 of the line, 0xc3, is not UTF-8"),
    ],
)
def test_bytes_that_are_not_text_are_named_and_the_lines_before_are_done(run, data, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["transformer_jax", "generate", str(run), "--batch-lines", "3"])
    stdin = b"\xef\xbb\xbf1 km\r\n2 km\n3 km\n4 km\n" + data + b"\n6 km\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    with pytest.raises(SystemExit):
        main()
    output = capsys.readouterr()
    assert output.out.count("\n") == 4
    assert output.err == f"error: line 5: {message}; convert it to UTF-8; the lines before it were done\n"


def test_output_is_utf8_in_every_locale(run):
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    lines = [f"{day} März" for day in range(1, 9)]
    code, out, _ = shell(f"PROGRAM generate {run} --prefix '<ja> für'", "\n".join(lines).encode(), **locale)
    assert code == 0
    assert out.decode().count("\n") == 8 and not out.isascii()


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("generate RUN <&-", "error: standard input is closed; give the lines with < FILE"),
        ("generate RUN >&-", "error: standard output is closed; send it to a file, or to /dev/null"),
        ("generate RUN > /dev/full", "error: standard output: No space left on device; free some space"),
        ("doctor > /dev/full", "error: standard output: No space left on device; free some space"),
        ("generate --help > /dev/full", "error: standard output: No space left on device; free some space"),
        ("checkpoints average RUN RUN/config.json/x", "not a folder; give another path, or make this one accessible"),
    ],
)
def test_what_the_system_refuses_is_one_line(run, command, line):
    code, out, lines = shell(f"PROGRAM {command.replace('RUN', str(run))}", b"5 km\n")
    assert (code, out, len(lines)) == (1, b"", 1)
    assert lines[0].endswith(line)


def test_nobody_who_reads_is_no_error(run):
    command = f"PROGRAM generate {run} --batch-lines 1 | head -1; exit ${{PIPESTATUS[0]}}"
    code, out, lines = shell(command, b"5 km\n" * 9)
    assert (code, out.count(b"\n"), lines) == (1, 1, [])


def test_without_standard_error_the_work_is_done(run):
    assert shell(f"PROGRAM generate {run} 2>&-", b"5 km\n")[0] == 0
    assert shell(f"PROGRAM generate {run} 2> /dev/full", b"5 km\n")[0] == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("two\nlines"), "error: two lines\n"),
        (PermissionError(13, "Permission denied", "a/b"), "error: a/b: Permission denied; give another path"),
        (OSError(30, "Read-only file system", b"a/\xff"), "error: a/\\udcff: Read-only file system; give another path"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (FileExistsError(17, "File exists", "a"), "error: a: exists and is not a folder; give another path"),
        (TimeoutError("timed out"), "error: timed out\n"),
        (BrokenPipeError(32, "Broken pipe"), ""),
    ],
)
def test_errors_of_the_system_are_one_line(error, line, capsys):
    with pytest.raises(SystemExit) as stop, user_errors():
        raise error
    err = capsys.readouterr().err
    assert stop.value.code == 1
    assert err.startswith(line) and err.count("\n") == bool(line)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(run, tmp_path, monkeypatch, capsys):
    def fill_the_disk(figure, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    out = tmp_path / "attention.png"
    out.write_bytes(b"old")
    monkeypatch.setattr("transformer_jax.visualize.save_figure", fill_the_disk)
    monkeypatch.setattr(sys, "argv", ["transformer_jax", "attention", str(run), "5 km", "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    assert "error: No space left on device" in capsys.readouterr().err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
    monkeypatch.setattr(sys, "argv", ["transformer_jax", "attention", str(run), "5 km", "--out", str(out / "a.png")])
    with pytest.raises(SystemExit):
        main()
    assert f"error: {out}: exists and is not a folder" in capsys.readouterr().err


def test_a_text_on_the_command_line_is_utf8():
    assert argument_text("text", os.fsdecode("März".encode())) == "März"
    with pytest.raises(UserError, match="byte 2 of the prefix, 0xe4, is not UTF-8"):
        argument_text("prefix", os.fsdecode("März".encode("latin-1")))


def test_the_new_run_of_an_average_takes_nothing_from_others(run, tmp_path, monkeypatch, capsys):
    neighbour = tmp_path / "mean.partial"
    neighbour.mkdir()
    (neighbour / "file").write_text("of somebody else")
    monkeypatch.setattr(sys, "argv", ["transformer_jax", "checkpoints", "average", str(run), str(tmp_path / "mean")])
    with contextlib.suppress(SystemExit):
        main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean", "mean.partial"]
    assert (neighbour / "file").read_text() == "of somebody else"
