"""The local engine: hosts are agents on this machine, found in a folder and reached over Unix sockets."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from functools import partial
from pathlib import Path

from everstep import kernel
from everstep.control.failures import Failure, Kind
from everstep.engine.base import Aside, EngineRequest, Sink
from everstep.engine.hearing import Hearing
from everstep.engine.local import aside
from everstep.engine.local.cluster import HostFile, LocalCluster, read_hosts, runtime_folder, socket_of
from everstep.engine.local.machine import check_feasible, visible_gpus
from everstep.engine.local.own_host import OwnHost
from everstep.errors import AgentVersionError, EverstepError
from everstep.protocol import framing, wire
from everstep.topology.slices import HostId, HostView, SliceName

_LOOK_S = 0.1


class _Stream(asyncio.Protocol):
    """One connection to an agent: the one for messages, or the one for heartbeats."""

    def __init__(self, link: LocalLink, beats: bool) -> None:
        self._link = link
        self._beats = beats
        self._frames = framing.Frames()

    def data_received(self, data: bytes) -> None:
        self._link.engine.hearing.heard(self._link.host)
        if not self._beats:
            for body in self._frames.feed(data):
                self._link.heard(wire.from_agent.decode(body))

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
        self.version = 0
        self.known = asyncio.Event()
        self._transports: list[asyncio.Transport] = []

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        ask = self.engine.ask
        path = str(socket_of(self.engine.folder, self.host))
        for beats in (False, True):
            transport, _ = await loop.create_unix_connection(partial(_Stream, self, beats), path)
            self._transports.append(transport)
            beat_s = ask.deadlines.heartbeat_interval_s if beats else 0.0
            transport.write(framing.frame(wire.Attach(wire.WIRE_VERSION, ask.run, ask.lease, beat_s)))
        self.alive = True
        self.engine.hearing.watch(self.host)

    def send(self, message: wire.AnyToAgent) -> None:
        if self._transports and not self._transports[0].is_closing():
            self._transports[0].write(framing.frame(message))

    def heard(self, message: wire.AnyFromAgent) -> None:
        if isinstance(message, wire.Status):
            self.run, self.version = message.run, message.version
            if self.retiring and message.retired:
                self.retiring = False
                self.alive = True
                self.engine.hearing.watch(self.host)
            self.known.set()
            self.engine.status_changed()
        elif not self.retiring:
            self.engine.sink.on_message(self.host, message)

    def lost(self) -> None:
        """The connection broke: the agent is dead, and its workers with it."""
        self.close()
        if self.host in self.engine.links:
            self.engine.host_lost(self, Kind.HOST_LOST, time.monotonic(), "its agent died")

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports = []

    def view(self) -> HostView:
        slots = self.facts.slots if self.facts.slots is not None else self.engine.ask.workers
        return HostView(
            self.host,
            self.facts.slice,
            self.facts.index,
            slots,
            self.facts.hosts_in_slice,
            self.alive,
            self.run in ("", self.engine.ask.run),
        )


class LocalEngine:
    """Hosts of a ``LocalCluster``; without one given, a host of its own for this run."""

    shares_machine = True
    brings_folder = False
    sink: Sink
    ask: EngineRequest

    def __init__(self, cluster: LocalCluster | None = None) -> None:
        self._cluster = cluster
        self._own: OwnHost | None = None
        self.folder = Path()
        self.links: dict[HostId, LocalLink] = {}
        self._dead: dict[HostId, LocalLink] = {}
        self._claiming: dict[int, set[HostId]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._last_view: tuple[HostView, ...] = ()
        self._one_look = asyncio.Lock()

    def whoami(self) -> str:
        return ""  # a process of this machine: the kernel knows whether it lives

    def is_dead(self, driver: str) -> bool:
        return False

    async def open(self, sink: Sink, ask: EngineRequest) -> None:
        check_feasible(ask, self._cluster)
        self.sink, self.ask = sink, ask
        self.hearing = Hearing(ask.deadlines, self._silent)
        if self._cluster is None:
            # Named after the run, so that another driver of it finds the agents that this one may leave
            # behind.
            name = "r" + hashlib.sha256(ask.run.encode()).hexdigest()[:16]
            self._own = OwnHost(LocalCluster(0, 1, None, folder=runtime_folder() / name))
            self.folder = self._own.folder
        else:
            self.folder = self._cluster.folder
        await self._look()
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self.hearing.run())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def run_aside(self, work: Aside) -> bytes:
        return await aside.run_aside(work)

    async def close(self, *, keep_hosts: bool) -> None:
        for task in self._tasks:
            task.cancel()
        links, self.links = self.links, {}
        for link in links.values():
            link.close()
        if self._own is not None and not keep_hosts:
            await asyncio.get_running_loop().run_in_executor(None, self._own.close)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A bug, or a machine on which nothing can be started any more: who would notice hosts now?"""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.sink.on_broken(error)

    # ------------------------------------------------------------------ finding hosts

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        async with self._one_look:
            await self._connect_to_new()
        self.status_changed()

    async def _connect_to_new(self) -> None:
        there = read_hosts(self.folder)
        # Gone for good, or back as another process under the same name.
        for host in [h for h, link in self._dead.items() if there.get(h) != link.facts]:
            del self._dead[host]
        for host, facts in there.items():
            if host not in self.links and host not in self._dead:
                link = LocalLink(self, facts)
                try:
                    await link.connect()
                    self.links[host] = link
                    await asyncio.wait_for(link.known.wait(), self.ask.deadlines.heartbeat_timeout_s)
                except (OSError, TimeoutError):
                    self.links.pop(host, None)
                    link.close()  # not up yet, or on its way out: look again
                else:
                    if link.version != wire.WIRE_VERSION:
                        self._refuse(link)

    def _refuse(self, link: LocalLink) -> None:
        """It speaks another version. An agent that an earlier driver of this run left behind is ended when
        this machine is used, like one that is silent; any other is the user's.
        """
        error = AgentVersionError(link.host, link.version, wire.WIRE_VERSION)
        self.hearing.forget(link.host)
        self._dead[link.host] = self.links.pop(link.host)
        link.alive = False
        link.close()
        if self._own is None:
            raise error
        if link.run:
            self.sink.on_trouble(
                f"workers of an earlier driver are ended, and the run goes on from its newest checkpoint: "
                f"{error.message}"
            )

    def status_changed(self) -> None:
        view = [link.view() for link in self.links.values()] + [link.view() for link in self._dead.values()]
        if self._own is not None and not any(link.alive for link in self.links.values()):
            # One machine, and its agent isn't up yet, was killed or is silent: the machine is still there.
            view.append(self._own.vacancy(self.ask.workers))
        if tuple(view) != self._last_view:
            self._last_view = tuple(view)
            self.sink.on_capacity(tuple(view))
        for reservation, hosts in list(self._claiming.items()):
            self._check_claims(reservation, hosts)

    # ------------------------------------------------------------------ losing hosts

    def _silent(self, host: HostId, since: float) -> None:
        link = self.links.get(host)
        if link is not None and link.alive:
            silence = time.monotonic() - since
            self.host_lost(link, Kind.HOST_SILENT, since, f"no heartbeat for {silence:.1f} s")

    def host_lost(self, link: LocalLink, kind: Kind, at: float, message: str) -> None:
        self.hearing.forget(link.host)
        was_alive, link.alive = link.alive, False
        if kind is Kind.HOST_LOST:
            self.links.pop(link.host, None)
            self._dead[link.host] = link
        if was_alive:
            self.sink.on_lost(link.host, Failure(kind, at, message, host=link.host))
        self.status_changed()

    def retire(self, host: HostId) -> None:
        link = self.links.get(host)
        if link is not None:
            link.alive = False
            link.retiring = True
            self.hearing.forget(host)
            link.send(wire.Retire(self.ask.lease))

    # ------------------------------------------------------------------ reserving

    def held(self) -> list[HostId]:
        return sorted(link.host for link in self.links.values() if link.run == self.ask.run)

    def claim(self, host: HostId) -> None:
        me = os.getpid()
        owner = (me, kernel.start_time(me) or 0)
        self.send(host, wire.Claim(self.ask.run, self.ask.lease, self.ask.deadlines.orphan_s, owner))

    def unclaim(self, host: HostId) -> None:
        self.send(host, wire.Unclaim(self.ask.lease))

    def request_capacity(self, workers: int) -> None:
        """This machine is what it is: nothing can be asked to grow it."""

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        if self._own is not None and self._own.slice in slices and self._own.starting:
            self._claiming[reservation] = {self._own.host}  # it was asked for before, and is on its way
            return
        if self._own is not None and self._own.is_vacant(slices):
            self._claiming[reservation] = {self._own.host}
            self._own.begin()
            task = asyncio.create_task(self._start_own(self._own))
            task.add_done_callback(self._ended)
            self._tasks.append(task)
            return
        hosts = {link.host for link in self.links.values() if link.facts.slice in slices}
        self._claiming[reservation] = hosts
        for host in hosts:
            self.claim(host)
        self._check_claims(reservation, hosts)

    async def _start_own(self, own: OwnHost) -> None:
        host = own.host
        # Whatever was here before has no say from now on, also if it comes to life again: it is being ended.
        for link in list(self.links.values()):
            self.hearing.forget(link.host)
            self._dead[link.host] = self.links.pop(link.host)
            link.alive = link.retiring = False
            link.close()
        try:
            await own.start()
            await self._look()
        except (EverstepError, OSError) as error:
            own.started(failed=True)
            for reservation in [r for r, hosts in self._claiming.items() if host in hosts]:
                del self._claiming[reservation]
                self.sink.on_reservation_failed(reservation, str(error))
        else:
            own.started(failed=False)
            if any(host in hosts for hosts in self._claiming.values()):
                self.claim(host)
        self.status_changed()

    def _check_claims(self, reservation: int, hosts: set[HostId]) -> None:
        if self._own is not None and self._own.starting in hosts:
            return
        links = [self.links[host] for host in hosts if host in self.links]
        taken = sorted(link.host for link in links if link.run not in ("", self.ask.run))
        missing = sorted(hosts - {link.host for link in links if link.alive})
        if taken or missing or not hosts:
            del self._claiming[reservation]
            for link in links:
                link.send(wire.Unclaim(self.ask.lease))
            why = f"{', '.join(taken)} in use by others" if taken else f"{', '.join(missing) or 'hosts'} gone"
            self.sink.on_reservation_failed(reservation, why)
        elif all(link.run == self.ask.run for link in links):
            del self._claiming[reservation]
            self.sink.on_reserved(reservation)

    def release(self, slices: tuple[SliceName, ...]) -> None:
        if self._own is not None and self._own.slice in slices:
            for hosts in self._claiming.values():
                hosts.discard(self._own.host)
        for link in self.links.values():
            if link.facts.slice in slices:
                for hosts in self._claiming.values():
                    hosts.discard(link.host)
                link.send(wire.Unclaim(self.ask.lease))
        self._claiming = {r: hosts for r, hosts in self._claiming.items() if hosts}

    # ------------------------------------------------------------------ talking to agents

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        link = self.links.get(host)
        if link is not None:
            link.send(message)

    def time_here(self, host: HostId, at: float) -> float:
        return at  # one machine, one clock

    def address(self, host: HostId) -> str:
        return "127.0.0.1"

    def devices(self, host: HostId) -> tuple[str, ...]:
        return visible_gpus() if self._cluster is None and os.name == "posix" else ()
