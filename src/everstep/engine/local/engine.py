"""The local engine: hosts are agents on this machine, found in a folder and reached over Unix sockets."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from everstep.agent.sockets import PEER_SOCKET
from everstep.engine.base import EngineRequest, SideTask, Sink
from everstep.engine.heartbeats import Heartbeats
from everstep.engine.local import side_task
from everstep.engine.local.cluster import LocalCluster, runtime_folder, socket_of
from everstep.engine.local.link import LocalLink
from everstep.engine.local.machine import check_feasible, visible_gpus
from everstep.engine.local.own_host import OwnHost
from everstep.engine.local.reservations import LocalReservations
from everstep.engine.local.search import HostSearch
from everstep.failures import Failure, Kind
from everstep.process import kernel
from everstep.protocol import wire
from everstep.protocol.peer_messages import PeerAddress
from everstep.topology.slices import HostId, HostView, SliceName


class LocalEngine:
    """Hosts of a ``LocalCluster``; without one given, a host of its own for this run."""

    shares_machine = True
    brings_folder = False
    sink: Sink
    request: EngineRequest

    def __init__(self, cluster: LocalCluster | None = None) -> None:
        self._cluster = cluster
        self.own: OwnHost | None = None
        self._reservations = LocalReservations(self)
        self.folder = Path()
        self.links: dict[HostId, LocalLink] = {}
        self.dead: dict[HostId, LocalLink] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._last_view: tuple[HostView, ...] = ()
        self._search = HostSearch(self)

    def whoami(self) -> str:
        return ""  # a process of this machine: the kernel knows whether it lives

    def is_dead(self, driver: str) -> bool:
        return False

    async def open(self, sink: Sink, request: EngineRequest) -> None:
        check_feasible(request, self._cluster)
        self.sink, self.request = sink, request
        self.heartbeats = Heartbeats(request.deadlines, self._silent)
        if self._cluster is None:
            # Named after the run, so that another driver of it finds the agents that this one may leave
            # behind.
            name = "r" + hashlib.sha256(request.run.encode()).hexdigest()[:16]
            cluster = LocalCluster(0, 1, None, folder=runtime_folder() / name)
            self.own = OwnHost(cluster, request.journal, request.lease)
            self.folder = self.own.folder
        else:
            self.folder = self._cluster.folder
        await self._search.connect_to_new(patiently=True)
        self.status_changed()
        self.spawn(self._search.keep_finding_hosts())

    def count_silence(self) -> None:
        self.spawn(self.heartbeats.run())

    async def run_side_task(self, work: SideTask) -> bytes:
        return await side_task.run_side_task(work)

    async def close(self, *, keep_hosts: bool) -> None:
        for task in self._tasks:
            task.cancel()
        links, self.links = self.links, {}
        for link in links.values():
            link.close()
        if self.own is not None and not keep_hosts:
            await asyncio.get_running_loop().run_in_executor(None, self.own.close)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """As long as the engine is open."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task has failed: a bug, or a machine on which nothing can be started any more. Hosts would no
        longer be watched, so the run ends.
        """
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.sink.on_broken(error)

    # ------------------------------------------------------------------ finding hosts

    async def find_hosts(self) -> None:
        await self._search.connect_to_new()
        self.status_changed()

    def status_changed(self) -> None:
        view = [link.view() for link in self.links.values()] + [link.view() for link in self.dead.values()]
        if self.own is not None and not any(link.alive for link in self.links.values()):
            # One machine, and its agent isn't up yet, was killed or is silent: the machine is still there.
            view.append(self.own.vacancy(self.request.workers))
        if tuple(view) != self._last_view:
            self._last_view = tuple(view)
            self.sink.on_capacity(tuple(view))
        self._reservations.check()

    # ------------------------------------------------------------------ losing hosts

    def _silent(self, host: HostId, since: float) -> None:
        link = self.links.get(host)
        if link is not None and link.alive:
            silence = time.monotonic() - since
            self.host_lost(link, Kind.HOST_SILENT, since, f"no heartbeat for {silence:.1f} s")
            if not link.retiring and self.links.get(host) is link:
                del self.links[host]  # nothing of ours is there: it is found anew once it answers
                link.close()
                self.status_changed()

    def host_lost(self, link: LocalLink, kind: Kind, at: float, message: str) -> None:
        self.heartbeats.forget(link.host)
        was_alive, link.alive = link.alive, False
        if kind is Kind.HOST_LOST:
            self.links.pop(link.host, None)
            self.dead[link.host] = link
        if was_alive:
            self.sink.on_lost(link.host, Failure(kind, at, message, host=link.host))
        self.status_changed()

    def retire(self, host: HostId) -> None:
        link = self.links.get(host)
        if link is not None:
            link.alive = False
            link.retiring = True
            self.heartbeats.forget(host)
            link.send(wire.Retire(self.request.lease))
            self.status_changed()

    # ------------------------------------------------------------------ reserving

    def held(self) -> list[HostId]:
        return sorted(link.host for link in self.links.values() if link.run == self.request.holder)

    def claim(self, host: HostId) -> None:
        me = os.getpid()
        owner = (me, kernel.start_time(me) or 0)
        self.send(
            host, wire.Claim(self.request.holder, self.request.lease, self.request.deadlines.orphan_s, owner)
        )

    def unclaim(self, host: HostId) -> None:
        self.send(host, wire.Unclaim(self.request.lease))

    def request_capacity(self, workers: int) -> None:
        """This machine is what it is: nothing can be asked to grow it."""

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        self._reservations.reserve(reservation, slices)

    def release(self, slices: tuple[SliceName, ...]) -> None:
        self._reservations.release(slices)

    # ------------------------------------------------------------------ talking to agents

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        link = self.links.get(host)
        if link is not None:
            link.send(message)

    def time_here(self, host: HostId, at: float) -> float:
        return at  # one machine, one clock

    def address(self, host: HostId) -> str:
        return "127.0.0.1"

    def source(self, host: HostId) -> PeerAddress:
        return PeerAddress(str(socket_of(self.folder, host).with_name(PEER_SOCKET)))

    def devices(self, host: HostId) -> tuple[str, ...]:
        return visible_gpus() if self._cluster is None and os.name == "posix" else ()
