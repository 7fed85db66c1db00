"""The engine of a simulated driver: an ``Engine`` over the simulated cluster."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import cloudpickle

from everstep.engine.base import EngineRequest, SideTask, SideTaskDiedError, Sink
from everstep.failures import Failure, Kind
from everstep.protocol import wire
from everstep.protocol.peer_messages import PeerAddress
from everstep.sim.reservations import SimReservations
from everstep.sim.time import Process, RuleBroken, VirtualTime
from everstep.topology.slices import HostId, HostView, SliceName

if TYPE_CHECKING:
    from everstep.sim.agents import SimAgent
    from everstep.sim.cluster import Cluster

_AGAIN = wire.Spawned | wire.Gone | wire.Exited | wire.Uploaded | wire.Quiet | wire.Examined | wire.Prepared
"""Messages that may come twice. Streams of workers have offsets, and come over one connection."""


_STATUS_S = 0.001
_LEAVE_S = 5.0
"""What a driver takes to leave, once it knows that it was replaced."""


class SimChannel:
    """Messages between two parties: late, but in the order in which they were sent."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self._time = time
        self._rng = rng
        self._last = 0.0

    def lag(self, seconds: float) -> None:
        """What is sent from now on takes so much longer."""
        self._last = max(self._last, self._time.now) + seconds

    def send(self, deliver: Callable[[], object], process: Process | None = None) -> None:
        self.send_after(self._rng.uniform(0.0005, 0.02), deliver, process)

    def send_after(self, seconds: float, deliver: Callable[[], object], process: Process | None) -> None:
        self._last = max(self._last, self._time.now + seconds)
        self._time.at(self._last, deliver, process)


class NoMachines:
    """What an engine answers whose hosts are on no machine."""

    shares_machine = False
    brings_folder = False

    def whoami(self) -> str:
        return ""

    def is_dead(self, driver: str) -> bool:
        return False

    def request_capacity(self, workers: int) -> None:
        pass

    def address(self, host: HostId) -> str:
        return "127.0.0.1"

    def source(self, host: HostId) -> PeerAddress:
        return PeerAddress(host)

    def devices(self, host: HostId) -> tuple[str, ...]:
        return ()


class Replacement:
    """8: a driver that knows that it was replaced leaves, with or without storage."""

    def __init__(self, engine: SimEngine, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster
        self._obeyed: set[HostId] = set()
        """Hosts whose agents have said that they are this driver's."""
        self._knows = False
        """One of them has said that it is a later driver's."""

    def noted(self, host: HostId, lease: int) -> None:
        if lease == self._engine.lease:
            self._obeyed.add(host)
        elif lease > self._engine.lease and host in self._obeyed and not self._knows:
            self._knows = True
            self._count_down(self._cluster.scenario.deadlines.storage_s + _LEAVE_S)

    def _count_down(self, left_s: float) -> None:
        """The time in which the driver is paused doesn't count."""
        process = self._engine.process
        if not self._engine.is_open:
            return
        if left_s <= 0:
            broken = f"8: {process.name} has heard that it was replaced, and drives on"
            self._cluster.time.failed(RuleBroken(broken))
        process.later(1.0, partial(self._count_down, left_s - 1.0))


class Patience:
    """10: while a driver takes over that sees which agents live, none of them is given up, and what is in the
    memory of its host with it, before the time that it has for an answer is over.
    """

    def __init__(self, engine: SimEngine, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster
        self.over = False
        """The driver has taken over."""
        self._since: dict[HostId, float] = {}
        """Of agents that were asked what they have, and have not reported all of it."""

    @property
    def is_needed(self) -> bool:
        engine = self._engine
        return (
            self._cluster.scenario.one_machine and engine.is_open and engine.process.alive and not self.over
        )

    def asked(self, host: HostId) -> None:
        if self.is_needed:
            self._since[host] = self._cluster.time.now

    def answered(self, host: HostId) -> None:
        self._since.pop(host, None)

    def check(self, given_up: HostId) -> None:
        since, now = self._since.get(given_up), self._cluster.time.now
        limit = self._cluster.scenario.deadlines.take_over_s
        if since is not None and self._cluster.hosts[given_up].alive and now < since + limit:
            raise RuleBroken(f"10: {given_up} lives, and is given up after {now - since:.1f} s")


class SimEngine(NoMachines):
    """As one driver process has it."""

    def __init__(self, process: Process, cluster: Cluster, ahead: float) -> None:
        self.process = process
        self.lease = 0
        self.ahead = ahead
        """By how much the driver's clock is ahead of those of the hosts."""
        self._cluster = cluster
        self._sink: Sink | None = None
        self._run = ""
        self.channels_from: defaultdict[HostId, SimChannel]
        self.channels_from = defaultdict(partial(SimChannel, cluster.time, cluster.rng))
        self._channels_to: defaultdict[HostId, SimChannel]
        self._channels_to = defaultdict(partial(SimChannel, cluster.time, cluster.rng))
        self._calls = SimChannel(cluster.time, cluster.rng)
        self._reservations = SimReservations(self, cluster)
        self.retired: set[HostId] = set()
        """Hosts that count as lost for this driver, until all has ended on them."""
        self.patience = Patience(self, cluster)
        self.connected: set[HostId] = set()
        """Hosts whose agents say to this driver who holds them, also after it was replaced."""
        self._replacement = Replacement(self, cluster)
        cluster.engines.append(self)

    @property
    def sink(self) -> Sink | None:
        """The driver; None once it has closed."""
        return self._sink

    @property
    def is_open(self) -> bool:
        return self._sink is not None

    async def open(self, sink: Sink, request: EngineRequest) -> None:
        self._sink, self._run, self.lease = sink, request.holder, request.lease
        if self._cluster.scenario.one_machine:
            self._cluster.hear_again()
        sink.on_capacity(self.view())
        for slice_ in self._cluster.slices.values():
            if slice_.deadline is not None:
                for agent in slice_.hosts:
                    self.notice(agent, slice_.deadline)

    # ------------------------------------------------------------------ to the driver

    def _call_sink(self, call: Callable[[Sink], object]) -> None:
        """The driver receives this, late, if it lives then."""
        self._calls.send(partial(self._deliver, call), self.process)

    def _deliver(self, call: Callable[[Sink], object]) -> None:
        if self._sink is not None:
            call(self._sink)

    def lists(self, agent: SimAgent) -> bool:
        return agent.listed and agent.host not in self.retired

    def view(self) -> tuple[HostView, ...]:
        return self._cluster.view(self._run, self.lists)

    def announce(self) -> None:
        """What there is when the driver receives it."""
        if self._sink is not None:
            self._call_sink(lambda sink: sink.on_capacity(self.view()))

    def lost(self, agent: SimAgent, kind: Kind, happened: float) -> None:
        message = "connection broken" if kind is Kind.HOST_LOST else "no heartbeat"
        failure = Failure(kind, happened + self.ahead, message, host=agent.host)
        # The call of the loss and the new list of hosts may overtake each other, but not the list in which
        # the host is there again.
        pause = self._cluster.rng.uniform(0.001, 0.05)

        def report(sink: Sink) -> None:
            if agent.lost:
                sink.on_lost(agent.host, failure)

        self.process.later(pause, partial(self._deliver, report))

    def notice(self, agent: SimAgent, deadline: float | None) -> None:
        def report(sink: Sink) -> None:
            grace = None if deadline is None else max(0.0, deadline - self._cluster.time.now)
            sink.on_message(agent.host, wire.Noticed(grace))

        self._call_sink(report)

    # ------------------------------------------------------------------ taking over

    def held(self) -> list[HostId]:
        return [
            agent.host
            for agent in self._cluster.hosts.values()
            if self.lists(agent)
            and (self._cluster.scenario.one_machine or not agent.frozen)
            and agent.claim.run == self._run
        ]

    def count_silence(self) -> None:
        self.patience.over = True

    # ------------------------------------------------------------------ reserving

    def left_behind(self, agent: SimAgent) -> bool:
        """An earlier driver has it still: it was silent while others were taken over."""
        return self.lists(agent) and agent.claim.run == self._run and agent.claim.lease < self.lease

    def claim(self, host: HostId) -> None:
        self.patience.asked(host)
        orphan_s = self._cluster.scenario.deadlines.orphan_s
        self.send(host, wire.Claim(self._run, self.lease, orphan_s, (0, 0)))

    def unclaim(self, host: HostId) -> None:
        self.patience.check(host)
        self.send(host, wire.Unclaim(self.lease))

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        self._reservations.request(reservation, slices)

    def release(self, slices: tuple[SliceName, ...]) -> None:
        self._reservations.withdraw(slices)
        for name in slices:
            for agent in self._cluster.slices[name].hosts:
                self.send(agent.host, wire.Unclaim(self.lease))

    def retire(self, host: HostId) -> None:
        if self.lists(self._cluster.hosts[host]):
            self.retired.add(host)
            self.announce()
        self.send(host, wire.Retire(self.lease))

    # ------------------------------------------------------------------ talking to agents

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        if self.process.alive:
            agent = self._cluster.hosts[host]
            self._channels_to[host].send(partial(agent.received, self, message))

    def received(self, agent: SimAgent, message: wire.AnyFromAgent) -> None:
        channel = self.channels_from[agent.host]
        deliver = partial(self._deliver, lambda sink: sink.on_message(agent.host, message))
        if isinstance(message, wire.HandedOver):
            channel.send(partial(self.patience.answered, agent.host), self.process)
        if isinstance(message, wire.Status):
            channel.send_after(_STATUS_S, deliver, self.process)
            noted = partial(self._replacement.noted, agent.host, message.lease)
            channel.send_after(_STATUS_S, noted, self.process)
            return
        channel.send(deliver, self.process)
        if isinstance(message, _AGAIN) and self._cluster.chance(self._cluster.scenario.duplicates):
            self.process.later(self._cluster.rng.uniform(0.03, 60.0), deliver)

    def time_here(self, host: HostId, at: float) -> float:
        return at + self.ahead

    async def run_side_task(self, work: SideTask) -> bytes:
        number = zlib.crc32(work.code)
        await asyncio.sleep(number % 200 / 100)
        if number % 5 == 0:
            raise SideTaskDiedError("killed")
        return cast(bytes, cloudpickle.loads(work.code).run())

    async def close(self, *, keep_hosts: bool) -> None:
        for agent in self._cluster.hosts.values():
            if agent.holder is self:
                if not keep_hosts:
                    self.send(agent.host, wire.Unclaim(self.lease))
                self._channels_to[agent.host].send(partial(agent.lost_driver, self))
        self._sink = None

    def died(self) -> None:
        """The driver's process is gone."""
        self._sink = None
        for agent in self._cluster.hosts.values():
            if agent.alive:
                agent.lost_driver(self)
