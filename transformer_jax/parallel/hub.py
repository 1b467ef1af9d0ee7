"""What process 0 decides for all processes: when they start, who is gone, and the step that they stop at."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.parallel.processes import Processes
from transformer_jax.parallel.wire import SILENCE, Message, Wire, free_port, keep_alive, listen

NOTICE_EVERY = 10.0
VERDICT = 15.0
"""Seconds within which the end of a process is known to all others."""
LINGER = 2.0
"""Seconds that process 0 gives the others to read what it has sent before it ends."""
LARGEST_VALUE = 2**26
"""Bytes of a value that can be gathered."""


class Hub:
    """What process 0 decides for all. All of it runs in the side thread of process 0, and so needs no locks."""

    def __init__(
        self,
        processes: Processes,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Message], None],
        patience: float,
    ):
        self._processes, self._loop, self._deliver, self._patience = processes, loop, deliver, patience
        self._count = processes.count
        self._hosts: list[str] = []
        self._wires: dict[int, Wire] = {}
        """The connections to all others: to process 0 itself goes `deliver`."""
        self._has_started = self._has_ended = False
        self._finished: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._asked = self._agreed = self._is_over = False
        self._arrived: set[int] = set()
        self._question = ""
        """What the rescue that is being tried waits for: "ready" or "saved"; "" if none is."""
        self._answers: dict[int, Any] = {}
        self._values: dict[int, tuple[str, Any]] = {}

    async def serve(self) -> None:
        """Wait until all are there, or say who is missing."""
        if self._count == 1:
            self._start([])
            return
        (host, port), timeout = self._processes.address, self._processes.timeout
        try:
            server = await asyncio.start_server(self._admit, sock=listen(host, port), limit=2 * LARGEST_VALUE)
        except UserError as error:
            self._refuse(str(error))
            return
        asyncio.get_running_loop().create_task(keep_alive(lambda: list(self._wires.values()), self._lose))
        deadline, notice = time.monotonic() + timeout, time.monotonic() + NOTICE_EVERY
        while not self._has_started and not self._has_ended:
            await asyncio.sleep(0.05)
            missing = [str(index) for index in range(1, self._count) if index not in self._wires]
            here = f"{self._count - len(missing)} of {self._count} processes"
            if not missing:
                self._start([free_port(host)])
            elif time.monotonic() > deadline:
                self._refuse(
                    f"{here} came to {host}:{port} within {timeout:g} seconds, missing index {', '.join(missing)}; "
                    "start them with the same command, or give them more time with --processes.timeout SECONDS"
                )
            elif time.monotonic() > notice:
                notice += NOTICE_EVERY
                self._broadcast(kind="waiting", text=f"waiting: {here}, missing index {', '.join(missing)}")
        await server.serve_forever()  # to refuse those who come late

    def _start(self, ports: list[int]) -> None:
        self._has_started = True
        self._hosts = [socket.gethostname(), *(self._wires[index].host for index in range(1, self._count))]
        host = (self._processes.coordinator or "").rpartition(":")[0]
        self._broadcast(kind="start", hosts=self._hosts, jax_address=f"{host}:{ports[0]}" if ports else None)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            hello = await asyncio.wait_for(wire.read(), SILENCE)
            if hello is not None and hello["kind"] == "hello":
                await self._listen(hello, wire)
        except (TimeoutError, KeyError, TypeError, ValueError, asyncio.CancelledError):  # not one of ours, or the end
            pass
        finally:
            wire.close()

    async def _listen(self, hello: Message, wire: Wire) -> None:
        index, count, wire.host = int(hello["index"]), int(hello["count"]), str(hello["host"])
        known = self._wires.get(index)
        if self._has_started or self._has_ended:
            text = f"all {self._count} processes are there already; process {index} on {wire.host} is one too many"
            wire.write({"kind": "refused", "text": text})
            return
        if count != self._count or known is not None or index == 0:
            other = known.host if known else socket.gethostname()
            text = (
                f"process {index} on {wire.host} was started for {count} processes and process 0 for {self._count}; "
                "give all the same --processes.count"
                if count != self._count
                else f"two processes have the index {index}, on {other} and on {wire.host}; give each its own "
                "--processes.index"
            )
            wire.write({"kind": "refused", "text": text})
            self._refuse(text)
            return
        self._wires[index] = wire
        while (message := await wire.read()) is not None:
            self.receive(index, message)
        self._lose(wire, "its connection closed")

    def _lose(self, wire: Wire, reason: str) -> None:
        """A connection has ended, or nothing comes through it."""
        index = next((index for index, known in self._wires.items() if known is wire), None)
        wire.close()
        if index is None:
            return
        del self._wires[index]
        if self._has_started and index not in self._finished:
            self._end(index, self._reasons.get(index, reason))

    def receive(self, index: int, message: Message) -> None:
        """Take in what a process says."""
        match message["kind"]:
            case "stop" if not self._asked:
                self._asked = True
                self._broadcast(kind="freeze")
            case "frozen":
                self._steps[index] = message["step"]
            case "arrived":
                self._arrived.add(index)
            case "ready" | "saved" if index not in self._finished:
                self._answers[index] = message["answer"]
            case "gather":
                self._values[index] = message["name"], message["value"]
            case "error":
                self._reasons[index] = message["text"]
            case "fail":
                self._end(index, message["text"])
            case "bye":
                self._finished.add(index)
                self._steps[index] = message["step"]
                self._answers[index] = None
                self._send(index, kind="bye") if index else None
        self._decide()

    def _decide(self) -> None:
        """Say what follows from all that was said so far."""
        everybody = set(range(self._count))
        if self._finished == everybody:
            self._send(0, kind="bye")
        if self._has_ended:
            return
        if self._asked and not self._agreed and self._steps.keys() == everybody:
            self._agreed = True
            self._broadcast(kind="run", step=max(self._steps.values()))
            self._later(self._patience, self._begin_rescue)
        if self._question and self._answers.keys() == everybody:
            self._continue_rescue(set(self._answers.values()))
        if self._agreed and not self._question and not self._is_over and self._arrived | self._finished == everybody:
            self._is_over = True
            self._broadcast(kind="over")
        if self._values and self._values.keys() | self._finished == everybody:
            names = {name for name, _ in self._values.values()}
            if self._values.keys() == everybody and len(names) == 1:
                self._broadcast(kind="gathered", values=[self._values[i][1] for i in sorted(everybody)])
            else:
                where = [f"process {i} is at {self._values[i][0]}" for i in sorted(self._values)]
                where += [f"process {i} has ended" for i in sorted(self._finished)]
                self._broadcast(kind="not gathered", text="; ".join(where))
            self._values = {}
        if self._reasons and self._reasons.keys() | self._finished == everybody:
            self._broadcast(kind="alone")

    def _begin_rescue(self) -> None:
        """Some have not come to the agreed step. Hold all, and ask which state each could save."""
        if self._has_ended or self._is_over:
            return
        if self._finished:  # which can no longer save with the others
            self._later(self._patience, self._begin_rescue)
            return
        self._ask("ready", "prepare")

    def _ask(self, question: str, kind: str) -> None:
        self._question, self._answers = question, dict.fromkeys(self._finished)
        self._broadcast(kind=kind)

    def _continue_rescue(self, answers: set[Any]) -> None:
        """All have answered: save if all have states of one step, leave if all have saved, go on otherwise."""
        if self._question == "ready" and len(answers) == 1 and None not in answers:
            self._ask("saved", "save")
        elif self._question == "saved" and answers == {True}:
            self._has_ended = True
            self._broadcast_before_0(kind="leave")
        else:
            self._question = ""
            self._broadcast(kind="release")
            self._later(self._patience, self._begin_rescue)

    def _end(self, index: int, reason: str) -> None:
        """A process is gone, or about to go. Tell the others first and process 0 last, whose end they would notice."""
        if self._has_ended:
            return
        self._has_ended = True
        self._finished.add(index)
        self._send(index, kind="bye") if index else None
        self._broadcast_before_0(kind="gone", text=describe_loss(index, self._count, self._hosts[index], reason))

    def _refuse(self, text: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._broadcast_before_0(kind="refused", text=text)

    def _send(self, index: int, **message: Any) -> None:
        if index == 0:
            self._loop.call_soon(self._deliver, message)  # not before this is decided
        elif index in self._wires:
            self._wires[index].write(message)

    def _broadcast(self, **message: Any) -> None:
        for index in set(range(self._count)) - self._finished:
            self._send(index, **message)

    def _broadcast_before_0(self, **message: Any) -> None:
        for index in set(self._wires) - self._finished:
            self._send(index, **message)
        deadline = time.monotonic() + LINGER

        def last() -> None:
            if self._wires and time.monotonic() < deadline:
                self._later(0.05, last)
            else:
                self._send(0, **({"kind": "bye"} if 0 in self._finished else message))

        last()

    def _later(self, seconds: float, action: Callable[[], Any]) -> None:
        self._loop.call_later(seconds, action)


def describe_loss(index: int, count: int, host: str, reason: str) -> str:
    """What the others say of a process that is gone."""
    return (
        f"process {index} of {count} ({host}) is gone: {reason}; the others cannot go on without it; "
        "start the same command again to go on from the last checkpoint"
    )
