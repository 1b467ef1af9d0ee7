"""Two trainings in one workdir."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.lock import locked

PROGRAM = """
import sys, time
from pathlib import Path
from transformer_jax.training.lock import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", PROGRAM, folder], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    for _ in range(2):
        with pytest.raises(UserError, match=rf"process {holder.pid} on {socket.gethostname()} since .*\d\d:\d\d:\d\d"):
            locked(folder).__enter__()
    holder.kill()
    holder.wait()
    with locked(folder), pytest.raises(UserError, match=f"in use: process {os.getpid()} on"):
        locked(folder).__enter__()


def test_a_folder_with_nothing_else_in_it_is_removed(tmp_path):
    with locked(tmp_path / "runs" / "empty"):
        pass
    with locked(tmp_path / "runs" / "kept"):
        (tmp_path / "runs" / "kept" / "config.json").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["kept"]


def test_a_file_system_without_locks_is_a_note(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        pass
    assert f"{tmp_path / 'run'} cannot be locked ([Errno 37] No locks available)" in capsys.readouterr().err


def test_a_lock_that_its_holder_has_removed_is_not_taken_for_one(tmp_path, monkeypatch):
    folder, flock = tmp_path / "run", fcntl.flock

    def remove_first(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        (folder / "lock").unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(folder), pytest.raises(UserError, match="in use"):
        locked(Path(folder)).__enter__()
