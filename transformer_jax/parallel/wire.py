"""Connections between processes: one JSON object a line, and signs of life."""

import asyncio
import errno
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from transformer_jax.errors import UserError

HEARTBEAT_EVERY = 2.0
SILENCE = 10.0
"""Seconds without a sign of life after which a process counts as gone."""

Message = dict[str, Any]


class Wire:
    """One end of a connection, and for how many seconds nothing has come through it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.silence = 0.0
        self.host = ""

    async def read(self) -> Message | None:
        """The next message; None at the end."""
        try:
            line = await self._reader.readline()
            self.silence = 0.0
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):  # reset, too long, or not ours
            return None
        return message if isinstance(message, dict) and "kind" in message else None

    def write(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")  # never waits

    def close(self) -> None:
        self._writer.close()


async def keep_alive(wires: Callable[[], list[Wire]], lose: Callable[[Wire, str], None]) -> None:
    """Send signs of life, and give up on connections through which none come.

    Silence is counted in ticks of this thread, so that a process that was itself stopped for a while does not take that
    for the others' silence.
    """
    tick = HEARTBEAT_EVERY / 2
    for number in range(sys.maxsize):
        for wire in wires():
            if number % 2 == 0:
                wire.write({"kind": "beat"})
            wire.silence += tick
            if wire.silence > SILENCE:
                lose(wire, f"no sign of life for {SILENCE:g} seconds")
        await asyncio.sleep(tick)


def listen(host: str, port: int) -> socket.socket:
    """A socket for the others to connect to: of this machine only where they are on it too."""
    try:
        if is_loopback(host):
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise
            return socket.create_server(("", port))  # without IPv6
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror}); if another process 0 runs here, give each its "
            "own --processes.index, else another port in --processes.coordinator HOST:PORT"
        ) from None


def free_port(host: str) -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server((host if is_loopback(host) else "", 0)) as server:
        return server.getsockname()[1]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    return host in ("localhost", "::1") or host.startswith("127.")
