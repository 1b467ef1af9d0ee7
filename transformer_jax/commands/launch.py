"""`transformer-jax launch --processes 4 train.py ...`: train in several processes on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import tyro

from transformer_jax.commands.parsing import parse
from transformer_jax.errors import UserError
from transformer_jax.parallel.host import computes_on_cpu
from transformer_jax.parallel.peers import PEER_LOST
from transformer_jax.parallel.watchdog import HUNG

GRACE = 20.0
"""Seconds that the others have to end by themselves when one process has failed; then SIGTERM, and SIGKILL."""
KILL_AFTER = 10.0
PROGRESS_EVERY = 5.0
"""Seconds between the lines shown of a progress line that is written over and over."""
NOISE = b"[Gloo] Rank"
"""How lines begin that say nothing but that processes on CPU have found each other."""
POLL = 0.02
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BOOT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (AttributeError, OSError):
    pass
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Has the kernel kill the process when the launcher ends (PR_SET_PDEATHSIG, on Linux), then becomes the program."""


@dataclass(frozen=True)
class Launch:
    """Start several processes on this machine that train together: launch --processes N train.py ARGUMENTS."""

    processes: int
    """Number of processes to start."""
    devices_per_process: int | None = None
    """Devices that each process takes: simulated ones on CPU, GPUs of its own elsewhere."""
    max_restarts: int = 0
    """How often to start all processes again after one was killed, hangs or was preempted."""
    port: int | None = None
    """Port at which the processes find each other; a free one by default."""
    command: Annotated[tuple[str, ...], tyro.conf.Suppress, tyro.conf.Fixed] = ()

    def __post_init__(self) -> None:
        for name, least in {"processes": 1, "devices_per_process": 1, "max_restarts": 0, "port": 1}.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")

    def run(self) -> None:
        """Run them to their end, and end with the code of the first that failed."""
        for restarts in range(self.max_restarts + 1):
            with _noted_signals() as signals:
                port = self._port()
                group = _Group([self._start(index, port) for index in range(self.processes)])
                code = group.wait(signals)
            if code and not (signals and code > 128):  # what was asked to stop explains itself
                _say(group.verdict())
            is_failure = code in (PEER_LOST, HUNG) or code > 128
            if not is_failure or signals or restarts == self.max_restarts:
                raise SystemExit(code)
            _say(f"starting all {self.processes} processes again (restart {restarts + 1} of {self.max_restarts})")

    def _port(self) -> int:
        if self.port is not None:
            return self.port
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()[1]

    def _start(self, index: int, port: int) -> "_Child":
        environ = {
            **os.environ,
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(self.processes),
            "JAX_PROCESS_ID": str(index),
            "PYTHONUNBUFFERED": "1",
        }
        if (devices := self.devices_per_process) is not None:
            if computes_on_cpu():
                # XLA needs two threads for each simulated device.
                environ |= {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(max(2 * devices, os.cpu_count() or 1))}
            else:
                environ["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
        return _Child(index, self.command, environ)


def parse_launch(arguments: Sequence[str], prog: str) -> Launch:
    """The command that the arguments ask for. What follows the first that is no flag of ours is passed on untouched."""
    flags: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        flag = rest.pop(0)
        flags.append(flag)
        if "=" not in flag and flag not in ("-h", "--help") and rest:
            flags.append(rest.pop(0))
    launch = parse(Launch, flags, prog=prog)
    return replace(launch, command=_program(rest[1:] if rest[:1] == ["--"] else rest))


def _program(command: Sequence[str]) -> tuple[str, ...]:
    """What Python runs: a script, a module, or a command of this package."""
    if not command:
        raise UserError("there is nothing to launch; name a script or a command: launch --processes 2 train.py")
    first = command[0]
    if first.endswith(".py") and not Path(first).is_file():
        raise UserError(f"the script {first} does not exist")
    if first == "-m" or first.endswith(".py"):
        return (sys.executable, *command)
    return (sys.executable, "-m", "transformer_jax", *command)


class _Child:
    """A process, whose lines are passed on with its index before them."""

    def __init__(self, index: int, command: Sequence[str], environ: dict[str, str]):
        self.index = index
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOT, str(os.getpid()), *command],
            env=environ,
            stdin=None if index == 0 else subprocess.DEVNULL,  # which the first reads for all
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to the launcher, which passes it on once
        )
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [
            threading.Thread(target=_relay, args=(source, target.buffer, f"[{index}] ".encode()), daemon=True)
            for source, target in streams
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """What it has ended with, 128 and the number of a signal if by one; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Pass on its last lines."""
        for reader in self._readers:
            reader.join(2.0)  # another process may hold the other end


@dataclass
class _Group:
    """Processes that end together."""

    children: list[_Child]
    ended: dict[int, int] = field(default_factory=dict)
    """The code of each by its index, in the order in which they have ended."""
    sent: set[int] = field(default_factory=set)
    """Those that were made to end."""

    def wait(self, signals: list[int]) -> int:
        """Wait until all have ended, and pass signals on; returns one code for all."""
        passed_on = 0
        deadline: float | None = None
        try:
            while self._collect():
                for number in signals[passed_on:]:
                    passed_on += 1
                    self._send(number)
                # A process that was asked to stop has not failed, and the others may still be saving.
                if deadline is None and any(code and not (signals and code > 128) for code in self.ended.values()):
                    deadline = time.monotonic() + GRACE
                if deadline is not None and time.monotonic() > deadline:
                    number = signal.SIGKILL if self.sent else signal.SIGTERM
                    self.sent |= {child.index for child in self.children} - self.ended.keys()
                    self._send(number)
                    deadline = time.monotonic() + KILL_AFTER
                time.sleep(POLL)
        finally:
            for child in self.children:
                child.kill()
                child.finish()
        return self._first()[1]

    def verdict(self) -> str:
        """Which process failed, and how."""
        index, code = self._first()
        with contextlib.suppress(ValueError):
            return f"process {index} ended with code {code} ({signal.Signals(code - 128).name})"
        return f"process {index} ended with code {code}"

    def _collect(self) -> bool:
        """Take in who has ended; whether any is left."""
        for child in self.children:
            if child.index not in self.ended and (code := child.code) is not None:
                self.ended[child.index] = code
        return len(self.ended) < len(self.children)

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.index not in self.ended:
                child.kill() if number == signal.SIGKILL else child.send(number)

    def _first(self) -> tuple[int, int]:
        """Index and code of the first that failed by itself: not because of another one, nor because it was told to."""
        failed = [(index, code) for index, code in self.ended.items() if code]
        itself = [(index, code) for index, code in failed if code != PEER_LOST and index not in self.sent]
        return (itself or failed or [(0, 0)])[0]


def _relay(source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
    """Pass on whole lines. Of one that is written over again and again, show a state every few seconds."""
    text, shown = b"", time.monotonic()
    while piece := os.read(source.fileno(), 2**16):
        *lines, text = (text + piece).split(b"\n")
        for line in lines:
            if not line.startswith(NOISE):
                _write(target, prefix + _visible(line) + b"\n")
        written_over, _, rest = text.rpartition(b"\r")
        if state := _visible(written_over):
            text = rest or state + b"\r"
            if time.monotonic() > shown + PROGRESS_EVERY:
                shown = time.monotonic()
                _write(target, prefix + state + b"\n")
    if text:
        _write(target, prefix + _visible(text) + b"\n")


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line, which a carriage return begins anew."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_writing = threading.Lock()


def _write(target: IO[bytes], line: bytes) -> None:
    with _writing, contextlib.suppress(OSError, ValueError):  # nobody reads any more: the training goes on
        target.write(line)
        target.flush()


def _say(line: str) -> None:
    _write(sys.stderr.buffer, f"launch: {line}\n".encode())


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The signals that come while inside, instead of what they would do."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
