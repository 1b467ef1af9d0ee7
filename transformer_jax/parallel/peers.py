"""Several processes that know of each other: they meet, notice when one is gone, and agree on the step to stop at.

Process 0 is the hub of a star of TCP connections that carry one JSON object a line. Each process has one thread for
them beside its main thread, which may be inside a collective or the compiler for ever. Nothing here needs JAX, which
`start_jax` starts after all processes have met. A single process has no connections, and is answered at once.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.parallel.hub import LARGEST_VALUE, LINGER, NOTICE_EVERY, VERDICT, Hub, describe_loss
from transformer_jax.parallel.processes import Processes
from transformer_jax.parallel.wire import Message, Wire, keep_alive

PEER_LOST = 75
"""What a process exits with when another one is gone: EX_TEMPFAIL, for the same command can go on."""
CONNECTING = 5.0
"""Seconds for one attempt to reach process 0."""
LONGEST_LINE = 2**30
JAX_SPEAKS = 0.5
"""Seconds in which JAX prints pages about the loss of process 0, after which a line of ours can be found."""


@dataclass(frozen=True)
class Rescue:
    """How a side thread saves the state while the main thread is inside the compiler or an evaluation."""

    step: Callable[[], int | None]
    """The step of the state in memory; None while there is none to save, in the middle of a step which has taken it."""
    save: Callable[[], bool]
    """Saves the state together with the other processes; whether it is on disk."""
    leave: Callable[[], None]
    """Ends the process, after all have saved."""


class Peers:
    """The processes that train together, as one of them sees the others. `connect` makes it."""

    def __init__(self, processes: Processes, patience: float = 5.0):
        self.count, self.index = processes.count, processes.index
        self.processes = processes
        self.hosts = [socket.gethostname()]
        """The machine of each process."""
        self.jax_address: str | None = None
        """Where JAX's own coordination service is to listen."""
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hub: Hub | None = None
        self._wire: Wire | None = None
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._change = threading.Condition()
        self._dispatched = 0
        self._allowed = math.inf
        self._held = self._arrived = self._over = False
        self._rescue: Rescue | None = None
        self._saving = False
        self._gathered: concurrent.futures.Future[list[Any]] | None = None
        self._alone, self._closed = threading.Event(), threading.Event()
        self._closing = False
        self.uses_jax = False
        """Whether `start_jax` has let JAX of these processes work together."""

    def may_step(self, step: int) -> bool:
        """Whether to dispatch step number `step`, asked before it is. All processes stop after the same step.

        True at once while nobody has asked to stop. After that it may wait: until all have said how far they are, and,
        beyond the step that was agreed on, until all have come to it.
        """
        with self._change:
            while self._held or (step > self._allowed and not self._over):
                if not self._held and not self._arrived:
                    self._arrived = True
                    self._post(kind="arrived")
                self._change.wait()
            if step > self._allowed:
                return False
            self._dispatched = step
            return True

    def request_stop(self) -> None:
        """Ask all processes to stop after a step that they agree on; from any thread, but not in a signal handler."""
        self._post(kind="stop")

    def stop_step(self) -> int | None:
        """The last step, once it is agreed on; 0 if none was dispatched anywhere before it was."""
        with self._change:
            return None if math.isinf(self._allowed) else int(self._allowed)

    def on_stalled(self, rescue: Rescue | None) -> None:
        """Set what saves the state when some main thread does not come to the agreed step in time.

        Either all processes save, with states of the same step, or none does. Then all leave.
        """
        self._rescue = rescue

    def gather(self, value: Any, name: str = "gather") -> list[Any]:
        """Small JSON values of all processes, in the order of their indices; from the main thread of each."""
        if len(text := json.dumps(value)) > LARGEST_VALUE:
            raise ValueError(
                f"a value of {len(text):,} bytes is too large to gather; at most {LARGEST_VALUE:,} are sent"
            )
        if self.count == 1:
            return [json.loads(text)]
        self._gathered = concurrent.futures.Future()
        self._post(kind="gather", name=name, value=json.loads(text))
        return self._gathered.result()

    def barrier(self, name: str) -> None:
        """Wait until all processes are at the barrier of this name."""
        self.gather(None, name=f"barrier {name!r}")

    def explain(self, error: BaseException) -> None:
        """Wait for the end of another process that may be behind an error of this one, before it is reported.

        When a process is gone, collectives of the others fail at once, with errors that do not name it. If one is, this
        process ends here, with a line that does. If nobody is, or all processes have errors of their own, it returns.
        """
        if self.count > 1 and not isinstance(error, UserError):
            self._post(kind="error", text=_one_line(error))
            self._alone.wait(VERDICT)

    def fail(self, reason: BaseException | str) -> None:
        """Tell the others why this process is about to end. They end, too, and say so."""
        self._end("fail", LINGER + 1.0, text=_one_line(reason))

    def close(self) -> None:
        """End in order: nobody is alarmed, and others may go on. Process 0, which they meet at, waits for them."""
        if self.uses_jax and not self._closing:
            import jax

            jax.distributed.shutdown()
        self._end("bye", None if self.index == 0 else LINGER, step=self._dispatched)

    def _end(self, kind: str, seconds: float | None, **message: Any) -> None:
        if self._loop is not None and not self._closing:
            self._closing = True
            self._post(kind=kind, **message)
            self._closed.wait(seconds)
        self._stop_thread()

    def _post(self, **message: Any) -> None:
        with self._change:
            loop = self._loop or self._start_thread()
        with contextlib.suppress(RuntimeError):  # the thread has ended
            loop.call_soon_threadsafe(self._send, message)

    def _send(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.receive(0, message)
        elif self._wire is not None:
            self._wire.write(message)

    def _receive(self, message: Message) -> None:
        """Do what the hub asks; in the side thread."""
        match message["kind"]:
            case "waiting":
                _print(message["text"])
            case "refused":
                self._refuse(message["text"])
            case "start":
                self.hosts, self.jax_address = message["hosts"], message["jax_address"]
                self._started.set_result(None)
            case "freeze":
                self._hold(True)
                self._send({"kind": "frozen", "step": self._dispatched})
            case "run":
                self._hold(False, allowed=message["step"])
            case "prepare":
                self._hold(True)
                self._send({"kind": "ready", "answer": self._step_to_save()})
            case "save":
                self._saving = True
                threading.Thread(target=self._save, daemon=True).start()
            case "release":
                self._hold(False)
            case "over":
                self._hold(False, over=True)
            case "leave" if self._rescue is not None:
                self._closing = True
                threading.Thread(target=self._rescue.leave, daemon=True).start()
            case "gathered" if self._gathered is not None:
                self._gathered.set_result(message["values"])
            case "not gathered" if self._gathered is not None:
                self._gathered.set_exception(RuntimeError(message["text"]))
            case "alone":
                self._alone.set()
            case "gone" if not self._closing:  # else it is ending for a reason of its own
                _leave(message["text"])
            case "gone" | "bye":
                self._closed.set()

    def _hold(self, held: bool, *, allowed: float | None = None, over: bool = False) -> None:
        with self._change:
            self._held, self._over = held, self._over or over
            self._allowed = self._allowed if allowed is None else allowed
            self._change.notify_all()

    def _step_to_save(self) -> int | None:
        with contextlib.suppress(Exception):  # this thread must not end
            return None if self._saving or self._rescue is None else self._rescue.step()
        return None

    def _save(self) -> None:
        saved = False
        with contextlib.suppress(Exception):  # the main thread saves too, and says what is wrong
            saved = self._rescue is not None and self._rescue.save()
        self._saving = False
        self._post(kind="saved", answer=saved)

    def _refuse(self, text: str) -> None:
        if not self._started.done():
            self._closing = True
            self._started.set_exception(UserError(text))

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        """Start the side thread: of several processes at once, of a single one when it is asked to stop."""
        loop = self._loop = asyncio.new_event_loop()
        self._hub = Hub(self.processes, loop, self._receive, self._patience) if self.index == 0 else None
        threading.Thread(target=self._run_thread, args=(loop,), name="peers", daemon=True).start()
        return loop

    def _run_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        meeting = loop.create_task(self._hub.serve() if self._hub else self._join())
        loop.run_forever()
        meeting.cancel()
        loop.run_until_complete(_cancel_tasks())
        loop.close()

    def _stop_thread(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)

    async def _join(self) -> None:
        """Find process 0, then do what it says until this process ends."""
        deadline, notice = time.monotonic() + self.processes.timeout, time.monotonic() + NOTICE_EVERY
        host, port = self.processes.address
        hello = {"kind": "hello", "index": self.index, "count": self.count, "host": socket.gethostname()}
        while not self._started.done():
            try:
                connecting = asyncio.open_connection(host, port, limit=LONGEST_LINE)
                self._wire = Wire(*await asyncio.wait_for(connecting, CONNECTING))
                self._wire.write(hello)
                await self._listen(self._wire)
                problem = "it closed the connection"
            except (OSError, TimeoutError) as error:
                problem = getattr(error, "strerror", None) or str(error) or "no answer"
            if time.monotonic() > deadline:
                self._refuse(
                    f"process 0 was not reached at {host}:{port} within {self.processes.timeout:g} seconds "
                    f"({problem}); start it there, or give its address with --processes.coordinator HOST:PORT"
                )
            elif time.monotonic() > notice:
                notice += NOTICE_EVERY
                _print(f"waiting: process 0 cannot be reached at {host}:{port} ({problem})")
            await asyncio.sleep(0.2)

    async def _listen(self, wire: "Wire") -> None:
        watch = asyncio.get_running_loop().create_task(keep_alive(lambda: [wire], self._lost))
        try:
            while (message := await wire.read()) is not None:
                self._receive(message)
        finally:
            watch.cancel()
            wire.close()
        self._lost(wire, "its connection closed")

    def _lost(self, wire: "Wire", reason: str) -> None:
        if not self._started.done():
            wire.close()
        elif not self._closing:
            time.sleep(JAX_SPEAKS if self.uses_jax else 0.0)
            _leave(describe_loss(0, self.count, self.hosts[0], reason))


def connect(processes: Processes, *, patience: float = 5.0) -> Peers:
    """Meet the other processes; raises with the ones that are missing after `processes.timeout` seconds.

    Args:
        processes: which of them this is.
        patience: seconds that main threads have to come to the step they stop at, before states are rescued.
    """
    peers = Peers(processes, patience)
    if peers.count > 1:
        peers._start_thread()
        try:
            peers._started.result()
        except BaseException:
            peers._stop_thread()
            raise
    return peers


def alone() -> Peers:
    """A single process, which waits for nobody."""
    return connect(Processes())


async def _cancel_tasks() -> None:
    """Close the connections, each of which is held by a task."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _one_line(reason: BaseException | str) -> str:
    text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    return " ".join(text.split())[:500]


def _print(line: str) -> None:
    """Write a line past Python's own buffers, whose locks another thread may hold for ever."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _leave(line: str) -> None:
    """End this process, since another one is gone."""
    _print(f"\n{line}" if os.isatty(2) else line)  # below a progress bar
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(PEER_LOST)
