"""Several local processes: their environment, their lines, their signals, their ends, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transformer_jax.commands import launch as module
from transformer_jax.commands.launch import Launch, parse_launch
from transformer_jax.errors import UserError
from transformer_jax.parallel.peers import PEER_LOST
from transformer_jax.parallel.processes import find_processes
from transformer_jax.parallel.watchdog import HUNG

ROOT = Path(__file__).parent.parent
SCRIPT = "import json, os, signal, sys, time\nindex = int(os.environ['JAX_PROCESS_ID'])\n"


@pytest.fixture
def launch(tmp_path, capfd):
    """Run a script in several processes; returns the exit code, standard output and standard error."""

    def run(code, processes=2, **settings):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT + code)
        with pytest.raises(SystemExit) as stop:
            Launch(processes, command=(sys.executable, str(script), str(tmp_path)), **settings).run()
        out, err = capfd.readouterr()
        return stop.value.code, out, err

    return run


def lines_of(index, text):
    return [line[4:] for line in text.splitlines() if line.startswith(f"[{index}] ")]


def test_each_process_is_told_which_one_it_is(launch):
    code, out, _ = launch("print(json.dumps(dict(os.environ)))", processes=3, devices_per_process=2)
    assert code == 0
    environs = [json.loads(lines_of(index, out)[0]) for index in range(3)]
    found = [find_processes(environ) for environ in environs]
    assert [(processes.count, processes.index) for processes in found] == [(3, 0), (3, 1), (3, 2)]
    assert len({processes.coordinator for processes in found}) == 1
    assert all(environ["JAX_NUM_CPU_DEVICES"] == "2" and int(environ["NPROC"]) >= 4 for environ in environs)


def test_on_gpus_each_process_takes_its_own(launch, monkeypatch):
    monkeypatch.setattr(module, "computes_on_cpu", lambda: False)
    _, out, _ = launch("print(os.environ['JAX_LOCAL_DEVICE_IDS'])", devices_per_process=2, port=7)
    assert sorted(out.splitlines()) == ["[0] 0,1", "[1] 2,3"]


def test_lines_are_whole(launch):
    code = """
for number in range(200):
    for piece in (f"line {number} ", "of ", f"process {index}\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
sys.stderr.write("bytes \\udcff without an end")
"""
    ended, out, err = launch("sys.stderr.reconfigure(errors='surrogateescape')\n" + code, processes=3)
    assert ended == 0
    for index in range(3):
        assert lines_of(index, out) == [f"line {number} of process {index}" for number in range(200)]
    assert len(out.splitlines()) == 600 and sorted(os.fsencode(err).splitlines())[0].startswith(b"[0] bytes ")


def test_of_a_line_that_is_written_over_the_last_state_is_shown(launch, monkeypatch):
    code = "for i in range(5):\n    print(f'{i}0%', end='\\r', flush=True)\n    time.sleep(0.1)\nprint('done')"
    assert launch(code, processes=1)[1] == "[0] done\n"
    monkeypatch.setattr(module, "PROGRESS_EVERY", 0.25)
    out = launch(code, processes=1)[1]
    assert re.fullmatch(r"(\[0\] \d0%\n){1,2}\[0\] done\n", out), out
    other = code.replace("f'{i}0%', end='\\r'", "f'\\r{i}0%', end=''").replace("'done'", "'\\rdone'")
    out = launch(other, processes=1)[1]
    assert re.fullmatch(r"(\[0\] \d0%\n){1,2}\[0\] done\n", out), out


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(0)", 0),
        ("time.sleep(0.2)\nsys.exit(3 if index else 0)", 3),
        ("time.sleep(0.3 * index)\nsys.exit([75, 3][index])", 3),  # the first has lost the second
        ("sys.exit(75)", PEER_LOST),
        ("os.kill(os.getpid(), signal.SIGKILL if index else 0)\ntime.sleep(0.2)\nsys.exit(75)", 137),
        ("time.sleep(0.3 * (1 - index))\nsys.exit([4, 5][index])", 5),
    ],
)
def test_one_code_for_all(launch, code, expected):
    ended, _, err = launch(code)
    assert ended == expected
    assert ("launch: process " in err) == (expected != 0) and f"code {expected}" in err + "code 0"


def test_when_one_fails_the_others_have_some_time(launch, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.5)
    monkeypatch.setattr(module, "KILL_AFTER", 0.5)
    code = """
def terminated(*_):
    print("terminated", flush=True)
    if index == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, terminated)
print("ready", flush=True)
if index == 0:
    time.sleep(0.5)
    sys.exit(9)
begin = time.monotonic()
while time.monotonic() < begin + 60:
    time.sleep(0.01)
"""
    begin = time.monotonic()
    ended, out, _ = launch(code, processes=3)
    assert ended == 9 and time.monotonic() - begin < 20
    assert lines_of(1, out) == lines_of(2, out) == ["ready", "terminated"]


def test_what_the_launcher_has_ended_did_not_fail_by_itself(launch, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)
    assert launch("if index == 0:\n    sys.exit(75)\ntime.sleep(60)")[0] == PEER_LOST


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_to_all(launch, tmp_path, number):
    code = """
got = []
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, lambda number, frame: got.append(number))
open(os.path.join(sys.argv[1], f"ready{index}"), "w").close()
while not got:
    time.sleep(0.01)
time.sleep(0.3 * (1 + index))
print(f"saved after {[int(number) for number in got]}")
sys.exit(143)
"""

    def interrupt():
        while not all((tmp_path / f"ready{index}").exists() for index in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(number)
    ended, out, err = launch(code, max_restarts=3)
    assert ended == 143 and "starting all" not in err
    assert lines_of(0, out) == lines_of(1, out) == [f"saved after [{int(number)}]"]
    assert signal.getsignal(number) == before


FAIL_ONCE = """
marker = os.path.join(sys.argv[1], f"tried{index}")
is_second = os.path.exists(marker)
open(marker, "w").close()
if not is_second:
    time.sleep(0.2)
    FAIL
print("finished")
"""


@pytest.mark.parametrize(
    "fail", ["os.kill(os.getpid(), signal.SIGKILL)", f"sys.exit({PEER_LOST})", f"sys.exit({HUNG})", "sys.exit(143)"]
)
def test_what_was_killed_hangs_or_was_preempted_starts_again(launch, fail):
    ended, out, err = launch(FAIL_ONCE.replace("FAIL", fail), max_restarts=1)
    assert ended == 0 and lines_of(0, out) == lines_of(1, out) == ["finished"]
    assert "launch: starting all 2 processes again (restart 1 of 1)" in err


@pytest.mark.parametrize(("fail", "code"), [("sys.exit(1)", 1), ("sys.exit(2)", 2), ("raise ValueError", 1)])
def test_errors_do_not_start_again(launch, fail, code):
    ended, out, err = launch(FAIL_ONCE.replace("FAIL", fail), max_restarts=1)
    assert ended == code and "finished" not in out and "starting all" not in err


def test_restarts_come_to_an_end(launch):
    ended, _, err = launch("sys.exit(75)", max_restarts=2)
    assert ended == PEER_LOST and err.count("starting all 2 processes again") == 2


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_behind_when_the_launcher_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "print(os.getpid(), flush=True)\nfor _ in range(600):\n    time.sleep(0.1)")
    code = "import sys; from transformer_jax.commands.launch import parse_launch; parse_launch(sys.argv[1:], 'x').run()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, "--processes", "2", str(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    children = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    assert all(map(is_running, children))
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(map(is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.stdout.close()


def test_what_follows_the_script_is_passed_on(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    parsed = parse_launch(["--processes", "4", "--max-restarts=2", str(script), "--processes", "x", "--help"], "launch")
    assert (parsed.processes, parsed.max_restarts) == (4, 2)
    assert parsed.command == (sys.executable, str(script), "--processes", "x", "--help")
    for command in (["-m", "transformer_jax", "train"], ["train"], ["--", "train"]):
        parsed = parse_launch(["--processes=2", *command], "launch")
        assert parsed.command == (sys.executable, "-m", "transformer_jax", "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2"], "nothing to launch"),
        (["--processes", "2", "nowhere.py"], "the script nowhere.py does not exist"),
        (["--processes", "0", "train"], "--processes is 0; it must be at least 1"),
        (["--processes", "2", "--devices-per-process", "0", "train"], "--devices-per-process is 0"),
        (["--processes", "2", "--max-restarts", "-1", "train"], "--max-restarts is -1; it must be at least 0"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UserError, match=message):
        parse_launch(arguments, "launch")


def test_help_explains_each_flag(capsys):
    with pytest.raises(SystemExit):
        parse_launch(["--help"], "transformer-jax launch")
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--processes", "--devices-per-process", "--max-restarts", "--port"):
        assert flag in text
    assert "--command" not in text and "Number of processes to start" in text
