"""The driver's connections to one agent of this machine: one for messages, one for heartbeats."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from everstep.engine.local.cluster import HostFile, socket_of
from everstep.failures import Kind
from everstep.protocol import framing, wire
from everstep.topology.slices import HostView

if TYPE_CHECKING:
    from everstep.engine.local.engine import LocalEngine


class _Stream(asyncio.Protocol):
    """One connection to an agent: the one for messages, or the one for heartbeats."""

    def __init__(self, link: LocalLink, beats: bool) -> None:
        self._link = link
        self._beats = beats
        self._frames = framing.Frames()

    def data_received(self, data: bytes) -> None:
        self._link.engine.heartbeats.received(self._link.host)
        if not self._beats:
            for body in self._frames.feed(data):
                self._link.received(wire.from_agent.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost()


class LocalLink:
    """A host that the engine is connected to."""

    def __init__(self, engine: LocalEngine, facts: HostFile) -> None:
        self.engine = engine
        self.facts = facts
        self.host = facts.id
        self.alive = False
        self.retiring = False
        self.run = ""
        self.lease = 0
        self.workers = 0
        self.version = 0
        self.known = asyncio.Event()
        self._transports: list[asyncio.Transport] = []

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        request = self.engine.request
        path = str(socket_of(self.engine.folder, self.host))
        for beats in (False, True):
            transport, _ = await loop.create_unix_connection(partial(_Stream, self, beats), path)
            self._transports.append(transport)
            beat_s = request.deadlines.heartbeat_interval_s if beats else 0.0
            transport.write(
                framing.frame(wire.Attach(wire.WIRE_VERSION, request.holder, request.lease, beat_s))
            )

    async def answers(self, within_s: float) -> bool:
        """Whether its agent says in time who holds it. At once, if it has ended."""
        try:
            await asyncio.wait_for(self.known.wait(), within_s)
        except TimeoutError:
            return False
        return self.connected

    @property
    def connected(self) -> bool:
        return bool(self._transports)

    def send(self, message: wire.AnyToAgent) -> None:
        if self._transports and not self._transports[0].is_closing():
            self._transports[0].write(framing.frame(message))

    def received(self, message: wire.AnyFromAgent) -> None:
        if isinstance(message, wire.Status):
            self.run, self.lease, self.version = message.run, message.lease, message.version
            self.workers = message.workers
            if self.retiring and message.retired:
                self.retiring = False
                self.alive = True
                self.engine.heartbeats.watch(self.host)
            self.known.set()
            self.engine.status_changed()
        if not self.retiring:
            self.engine.sink.on_message(self.host, message)

    def lost(self) -> None:
        """The connection broke: the agent is dead, and its workers with it."""
        self.close()
        self.known.set()
        if self.engine.links.get(self.host) is self:
            self.engine.host_lost(self, Kind.HOST_LOST, time.monotonic(), "its agent died")

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports = []

    @property
    def is_left_behind(self) -> bool:
        """An earlier driver has it still: it was silent while others were taken over."""
        return self.run == self.engine.request.holder and self.lease < self.engine.request.lease

    def view(self) -> HostView:
        slots = self.facts.slots if self.facts.slots is not None else self.engine.request.workers
        return HostView(
            self.host,
            self.facts.slice,
            self.facts.index,
            slots,
            self.facts.hosts_in_slice,
            self.alive,
            self.run == self.engine.request.holder or (not self.run and not self.workers),
        )
