"""The Ray engine: whole slices of nodes, each reserved as one placement group with an agent on every node.

Placement groups and actors are detached and named under the run: they outlive the driver, and a later one
finds them. All slices of a reservation are asked for at once; unless all of them come, all are given back.

The engine's parts: ``watch`` (which nodes there are), ``reservations`` (asking and giving back), ``held``
(what is ours), ``leftovers`` (what an earlier driver had), ``endings`` (what a driver may end), ``demand``
(what the autoscaler is asked for), ``sweeper`` (an actor that cleans up after a driver that never comes
back), ``link`` and ``actor`` (the two ends of the connection to an agent).
"""

from __future__ import annotations

import asyncio
import time

from everstep.engine.base import EngineRequest, Sink
from everstep.engine.heartbeats import Heartbeats
from everstep.engine.ray import cluster, side_task
from everstep.engine.ray.actor import END_S, RAYLET_DIED
from everstep.engine.ray.capacity import POLL_S, Capacity
from everstep.engine.ray.demand import Demand
from everstep.engine.ray.endings import end_all
from everstep.engine.ray.held import HeldSlice, HeldSlices
from everstep.engine.ray.leftovers import find_what_is_left
from everstep.engine.ray.link import ActorLink
from everstep.engine.ray.reservations import Reservations
from everstep.engine.ray.sweeper import SweeperClient
from everstep.engine.ray.upkeep import OffLoop, keep_doing
from everstep.engine.ray.watch import ClusterWatch
from everstep.failures import Failure, Kind
from everstep.protocol import wire
from everstep.protocol.peer_messages import PeerAddress
from everstep.topology.slices import HostId, SliceName


class RayEngine:
    """Nodes of the Ray cluster that this process is, or can be, a driver of."""

    shares_machine = False
    run_side_task = staticmethod(side_task.run_side_task)
    is_dead = staticmethod(cluster.is_dead)
    sink: Sink
    request: EngineRequest
    heartbeats: Heartbeats
    watch: ClusterWatch
    demand: Demand

    def __init__(self) -> None:
        cluster.connect()
        self._slices = HeldSlices()
        self._tasks: list[asyncio.Task[None]] = []
        self.off_loop = OffLoop()

    @property
    def brings_folder(self) -> bool:
        """Given for the workers; or for this driver, itself a task or job of Ray's, which hands it on."""
        return "working_dir" in self.request.runtime_env or cluster.has_working_folder()

    def whoami(self) -> str:
        return cluster.driver_name()

    # ------------------------------------------------------------------ opening and closing

    async def open(self, sink: Sink, request: EngineRequest) -> None:
        self.sink, self.request = sink, request
        self.heartbeats = Heartbeats(request.deadlines, self._silent)
        self._tag = cluster.tag_of(request.holder)
        self.watch = ClusterWatch(request.wanted)
        self.demand = Demand(self._tag, request)
        self._capacity = Capacity(self, self._slices, self._tag)
        self._reservations = Reservations(self, self._tag)
        sweeper = SweeperClient(self._tag, request.deadlines.orphan_s, request.lease, self.off_loop)
        # Before anything is reserved, somebody is there who gives it back.
        await sweeper.ping()
        left = await find_what_is_left(self, self._tag)
        for held in left.kept:
            self._slices.add(held)
        self._reservations.end_later(left.silent)
        await self._capacity.update()
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                keep_doing(
                    "looking at the cluster", self._capacity.update, self._capacity.pause, sink.on_trouble
                ),
                keep_doing("reaching the run's sweeper", sweeper.keep, sweeper.pause, sink.on_trouble),
                keep_doing("counting heartbeats", self.heartbeats.run, lambda: POLL_S, sink.on_trouble),
            )
        ]

    async def close(self, *, keep_hosts: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if keep_hosts:
            for link in self._slices.links():
                self.unlink(link)
        else:
            self._reservations.give_back(self._slices.take(self._slices.names()))
        await self._reservations.close()
        if not keep_hosts:
            await self.off_loop(end_all, self._tag, self.request.lease, END_S)
        self.off_loop.close()

    # ------------------------------------------------------------------ which hosts there are

    def request_capacity(self, workers: int) -> None:
        self._capacity.wanted_workers = workers

    def held(self) -> list[HostId]:
        return self._slices.hosts()

    def count_silence(self) -> None:
        """Only its heartbeats say that a node lives: they have counted from the beginning."""

    def address(self, host: HostId) -> str:
        return self.watch.addresses[host]

    def source(self, host: HostId) -> PeerAddress:
        return PeerAddress("", self._slices.actor_name(host))

    def devices(self, host: HostId) -> tuple[str, ...]:
        link = self._slices.link(host)
        kind = "TPU" if self.request.wanted.per_worker.get("TPU") else "GPU"
        return tuple(link.accelerators.get(kind, ())) if link is not None else ()

    # ------------------------------------------------------------------ losing hosts

    def _silent(self, host: HostId, since: float) -> None:
        link = self._slices.link(host)
        if link is not None:
            self.watch.suspect(host)
            silence = time.monotonic() - since
            self._forget(link, Kind.HOST_SILENT, since, f"no heartbeat for {silence:.1f} s")

    def lost(self, link: ActorLink, why: str) -> None:
        """Its agent is gone, or its node, which may serve again once Ray has caught up."""
        if why == RAYLET_DIED:
            self.watch.suspect(link.host)
        self._forget(link, Kind.HOST_LOST, time.monotonic(), why)

    def _forget(self, link: ActorLink, kind: Kind, at: float, why: str) -> None:
        if self._slices.has(link):
            self._drop(link)
            self._capacity.forget_view()  # it counts as lost until the next look, which says what there is
            self.sink.on_lost(link.host, Failure(kind, at, why, host=link.host))

    def _drop(self, link: ActorLink) -> None:
        self._slices.drop(link)
        self.unlink(link)
        link.actor.end.remote(self.request.lease)

    def retire(self, host: HostId) -> None:
        """A later agent on that node waits until this one, and all that it started, is gone."""
        link = self._slices.link(host)
        if link is not None:
            self.watch.suspect(host)
            self._drop(link)

    # ------------------------------------------------------------------ reserving

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        self._reservations.reserve(reservation, slices)

    def reserved(self, reservation: int, slices: list[HeldSlice]) -> None:
        for held in slices:
            self._slices.add(held)
            for host in held.links:
                self.claim(host)
        self._capacity.publish()
        self.sink.on_reserved(reservation)

    def claim(self, host: HostId) -> None:
        link = self._slices.link(host)
        if link is not None:
            link.send(
                wire.Claim(
                    self.request.holder,
                    self.request.lease,
                    self.request.deadlines.orphan_s,
                    link.actor_process,
                )
            )

    def unclaim(self, host: HostId) -> None:
        link = self._slices.link(host)
        if link is not None:
            self.release((link.slice,))

    def release(self, slices: tuple[SliceName, ...]) -> None:
        self._reservations.withdraw(slices)
        self._reservations.give_back(self._slices.take(slices))

    # ------------------------------------------------------------------ talking to agents

    def unlink(self, link: ActorLink) -> None:
        """Listen no more."""
        self.heartbeats.forget(link.host)
        self.watch.forget_notice(link.host)
        link.close()

    def received(self, link: ActorLink, message: wire.AnyFromAgent) -> None:
        if self._slices.has(link):
            self.sink.on_message(link.host, message)

    def time_here(self, host: HostId, at: float) -> float:
        link = self._slices.link(host)
        return link.clock.ours(at) if link is not None else time.monotonic()

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        link = self._slices.link(host)
        if link is not None:
            link.send(message)
