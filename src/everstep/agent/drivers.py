"""Drivers, as their agent sees them: connections, heartbeats, and the one driver that holds the agent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Protocol

from everstep.protocol import framing, wire

_HIGH_WATER = 64 << 20


class Beats(threading.Thread):
    """Sends heartbeats. Shares no thread with anything that may wait."""

    def __init__(self) -> None:
        super().__init__(name="everstep-beats", daemon=True)
        self._sockets: list[tuple[socket.socket, float]] = []
        self._changed = threading.Event()

    def add(self, sock: socket.socket, interval: float) -> None:
        sock.setblocking(False)
        self._sockets = [*self._sockets, (sock, interval)]
        self._changed.set()

    def run(self) -> None:
        beat = framing.frame(wire.Beat())
        while True:
            sockets = self._sockets
            if not sockets:
                self._changed.wait()
                self._changed.clear()
                continue
            for entry in sockets:
                try:
                    entry[0].send(beat)
                except BlockingIOError:
                    pass  # a driver that doesn't read doesn't need more of them
                except OSError:
                    entry[0].close()
                    self._sockets = [e for e in self._sockets if e is not entry]
            time.sleep(min(interval for _, interval in sockets))


class Listener(Protocol):
    """The agent, as a connection sees it."""

    def received(self, connection: Connection, message: wire.AnyToAgent) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def keeps_up(self, connection: Connection, does: bool) -> None:
        """Whether the driver reads what it is sent."""
        ...


class Connection(asyncio.Protocol):
    """A driver's connection."""

    def __init__(self, agent: Listener) -> None:
        self._agent = agent
        self._frames = framing.Frames()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._agent.received(self, wire.to_agent.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._agent.lost(self)

    def pause_writing(self) -> None:
        self._agent.keeps_up(self, False)

    def resume_writing(self) -> None:
        self._agent.keeps_up(self, True)

    def send(self, message: wire.AnyFromAgent) -> None:
        if self.transport is not None:
            self.transport.write(framing.frame(message))


class Holder:
    """The driver that holds this agent, if there is one."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.keeps_up = True
        """False: leave the workers' messages where they are until it reads what it has been sent."""
        self.waiting: list[tuple[Connection, wire.AnyToAgent]] = []
        """What drivers sent while none could hold it, since workers of the last run were still ending."""

    def attach(self, connection: Connection | None) -> None:
        self.connection = connection
        self.keeps_up = True

    def send(self, message: wire.AnyFromAgent) -> None:
        if self.connection is not None:
            self.connection.send(message)

    @property
    def backlog(self) -> int:
        """Bytes that it has not read yet, beyond what the kernel keeps for it."""
        transport = self.connection.transport if self.connection is not None else None
        return transport.get_write_buffer_size() if transport is not None else 0
