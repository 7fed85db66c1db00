"""Simulated hosts: agents and workers that speak the wire protocol, and the engine that finds them.

Agents and workers do what theirs do in production, as far as a driver can tell: they keep what a worker said
until it is acknowledged, tell a later driver again, and train on while nobody drives.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never, cast

import cloudpickle
import msgspec

from everstep.agent.spool import Spool
from everstep.control.failures import Failure, Kind
from everstep.control.reports import Part
from everstep.driver.streams import Summary
from everstep.engine.base import Aside, AsideDiedError, EngineRequest, Sink
from everstep.errors import StorageError
from everstep.protocol import framing, wire, words
from everstep.sim.disk import View
from everstep.sim.time import Process, VirtualTime
from everstep.storage import checkpoints, restore
from everstep.storage.store import FileRecord
from everstep.topology.slices import HostId, HostView, SliceName
from everstep.validation import BY_DEFAULT

_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Training:
    """What the simulated training function does."""

    workers: int
    steps: int
    every: int
    """Steps between checkpoints."""
    step_s: float
    savers: frozenset[int]
    """The ranks that save something."""


class SimChannel:
    """Messages between two parties: late, but in the order in which they were sent."""

    def __init__(self, time: VirtualTime, rng: random.Random) -> None:
        self._time = time
        self._rng = rng
        self._last = 0.0

    def send(self, deliver: Callable[[], None]) -> None:
        self._last = max(self._last, self._time.now + self._rng.uniform(0.0005, 0.01))
        self._time.at(self._last, deliver)


class SimWorker:
    """A worker process."""

    def __init__(self, agent: SimAgent, spec: wire.WorkerSpec) -> None:
        self.spec = spec
        self.alive = True
        self.pid = agent.cluster.next_pid()
        self.spool = Spool(Path("/nowhere"), in_memory=_NO_LIMIT, on_disk=_NO_LIMIT)
        self.state = b""
        self.stopping = False
        self.returned = False
        self.exited: wire.Exited | None = None
        self.restored = 0
        self._agent = agent
        self._cluster = agent.cluster
        self._index = 0
        self._later(self._cluster.rng.uniform(0.05, 0.3), self._begin)

    @property
    def key(self) -> tuple[int, int]:
        return (self.spec.epoch, self.spec.member.rank)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._cluster.time.after(seconds, lambda: action() if self.alive else None)

    def say(self, message: msgspec.Struct) -> None:
        data = framing.frame(message)
        offset = self.spool.end
        self.spool.append(data)
        spec = self.spec
        self._agent.say(wire.FromWorker(spec.epoch, spec.generation, spec.member.rank, offset, data))

    def _begin(self) -> None:
        folder = self.spec.checkpoint
        if folder is not None:
            try:
                manifest = restore.verify(self._cluster.run.child(folder))
            except StorageError as error:
                self.say(words.Raised(str(error), "", False, self._cluster.time.now, False, folder))
                self.end(1, None, by_us=False)
                return
            self.restored = int(self._cluster.run.read(f"{folder}/{manifest.files[0].path}") or b"0")
        self.say(words.Hello(self.pid))
        self.say(words.Joined())
        self._next()

    def _next(self) -> None:
        training = self._cluster.training
        if self.restored + self._index >= training.steps:
            self.returned = True
            self.say(words.Returned(None))
            return
        self._later(training.step_s * self._cluster.rng.uniform(0.8, 1.5), self._step)

    def _step(self) -> None:
        training, rank = self._cluster.training, self.spec.member.rank
        step = self.restored + self._index + 1
        if step % training.every == 0 and rank in training.savers:
            self._later(self._cluster.rng.uniform(0.0, 0.5), lambda: self._save(step))
        else:
            self._report(None)

    def _save(self, step: int) -> None:
        """The files, then the part, then the report: a worker may die in between."""
        run, rank, index = self._cluster.run, self.spec.member.rank, self._index + 1
        folder = checkpoints.folder_name(self.spec.epoch, index, None, 0)
        data = str(step).encode()
        try:
            run.create(f"{folder}/shard-{rank}", data)
        except StorageError:
            self._report(None, failed="no space left")
            return
        self._later(self._cluster.rng.uniform(0.0, 0.3), lambda: self._bring(folder, index, data))

    def _bring(self, folder: str, index: int, data: bytes) -> None:
        spec, rank = self.spec, self.spec.member.rank
        metrics = self._metrics(index) if rank == 0 else b""
        share = checkpoints.Share(
            folder, rank, spec.epoch, index, 0, spec.generation, spec.member.world_size, metrics,
            BY_DEFAULT if rank == 0 and spec.validates and index % 3 == 0 else b"",
        )  # fmt: skip
        file = FileRecord(f"shard-{rank}", len(data), hashlib.sha256(data).hexdigest())
        try:
            part = checkpoints.record_part(self._cluster.run, share, [file])
        except StorageError:
            self._report(None, failed="no space left")
            return
        self._later(self._cluster.rng.uniform(0.0, 0.1), lambda: self._report(part))

    def _metrics(self, index: int) -> bytes:
        return msgspec.msgpack.encode({"epoch": self.spec.epoch, "x": index})

    def _report(self, part: Part | None, failed: str = "") -> None:
        self._index += 1
        raw = msgspec.Raw(self._metrics(self._index))
        self.say(words.Report(self._index, raw, part, bool(failed)))
        if failed:
            self.say(words.PartFailed(self._index, failed))
        self._next()

    def acknowledged_rows(self) -> set[bytes]:
        """What the driver said that it has dealt with."""
        upto = msgspec.msgpack.decode(self.state, type=Summary).upto if self.state else 0
        return {self._metrics(index) for index in range(1, upto + 1)}

    def end(self, code: int | None, signal: int | None, *, by_us: bool) -> None:
        if not self.alive:
            return
        self.alive = False
        spec, now = self.spec, self._cluster.time.now
        self.exited = wire.Exited(
            spec.epoch,
            spec.generation,
            spec.member.rank,
            now,
            code,
            signal,
            by_us,
            False,
            0,
            "",
            spec.log_path,
        )
        self._agent.say(self.exited)


class SimAgent:
    """A host's agent. It outlives drivers."""

    def __init__(self, cluster: Cluster, host: HostId, slice_: SliceName) -> None:
        self.cluster = cluster
        self.host = host
        self.slice = slice_
        self.alive = True
        self.run = ""
        self.lease = 0
        self.workers: dict[tuple[int, int], SimWorker] = {}
        self.ended: dict[tuple[int, int], SimWorker] = {}
        self.holder: SimEngine | None = None

    def say(self, message: wire.AnyFromAgent) -> None:
        if self.holder is not None and self.alive:
            self.holder.hear(self, message)

    def hear(self, engine: SimEngine, message: wire.AnyToAgent) -> None:
        if not self.alive:
            return
        match message:
            case wire.Claim():
                self._claim(engine, message)
            case wire.Attach():
                pass
            case _ if message.lease < self.lease or engine is not self.holder:
                pass  # a driver that was replaced has no say
            case wire.Unclaim() | wire.Retire() | wire.Shutdown():
                self.let_go()
            case wire.Prepare():
                prepared = wire.Prepared(True, "", 0.1)
                self.cluster.time.after(self.cluster.rng.uniform(0.05, 0.5), lambda: self.say(prepared))
            case wire.Start():
                self._start(message)
            case wire.Stop():
                self._stop(message)
            case wire.Tell():
                self._tell(message)
            case wire.Acknowledge():
                self._acknowledged(message)
            case wire.RunLighthouse() | wire.Forward() | wire.Examine():
                pass
            case _:
                assert_never(message)

    def _claim(self, engine: SimEngine, message: wire.Claim) -> None:
        if self.run not in ("", message.run) or message.lease < self.lease:
            return
        later = message.lease > self.lease > 0
        self.run, self.lease, self.holder = message.run, message.lease, engine
        if later:
            self._hand_over()

    def _hand_over(self) -> None:
        everybody = [*self.ended.values(), *self.workers.values()]
        held = [wire.Held(w.spec, w.pid, w.spool.acknowledged, w.state, w.stopping) for w in everybody]
        self.say(wire.Inventory(held))
        for worker in everybody:
            spec = worker.spec
            for offset, data in worker.spool.chunks():
                self.say(wire.FromWorker(spec.epoch, spec.generation, spec.member.rank, offset, data))
            if worker.exited is not None:
                self.say(worker.exited)
        self.say(wire.HandedOver())

    def _start(self, message: wire.Start) -> None:
        for spec in message.workers:
            if any(spec.epoch > epoch for epoch, _ in self.ended):
                self.ended.clear()
            worker = SimWorker(self, spec)
            self.workers[worker.key] = worker
            self.cluster.started(self.holder, spec)
            self.say(wire.Spawned(spec.epoch, spec.generation, spec.member.rank, worker.pid))

    def _stop(self, message: wire.Stop) -> None:
        for rank in message.ranks:
            worker = self.workers.get((message.epoch, rank))
            if worker is not None:
                worker.stopping = True
        gone = wire.Gone(message.epoch, message.generation, message.ranks)

        def end() -> None:
            for rank in message.ranks:
                self.kill_worker((message.epoch, rank), by_us=True)
            self.say(gone)

        self.cluster.time.after(self.cluster.rng.uniform(0.01, 0.3), end)

    def kill_worker(self, key: tuple[int, int], *, by_us: bool) -> None:
        worker = self.workers.pop(key, None)
        if worker is not None:
            self.ended[key] = worker
            worker.end(None, 9, by_us=by_us)

    def _tell(self, message: wire.Tell) -> None:
        for body in framing.Frames().feed(message.body):
            word = words.to_worker.decode(body)
            for rank in message.ranks:
                worker = self.workers.get((message.epoch, rank))
                if isinstance(word, words.Propose) and worker is not None and worker.alive:
                    worker.say(words.Counted(word.number, 0))

    def _acknowledged(self, message: wire.Acknowledge) -> None:
        for generation, rank, offset, state in message.ranks:
            key = (message.epoch, rank)
            worker = self.workers.get(key) or self.ended.get(key)
            if worker is not None and worker.spec.generation == generation:
                worker.spool.acknowledge(offset)
                worker.state = state

    def lost_driver(self, engine: SimEngine) -> None:
        if engine is self.holder:
            self.holder = None
            lease = self.lease
            orphan_s = self.cluster.orphan_s
            self.cluster.time.after(orphan_s, lambda: self._nobody_came(lease))

    def _nobody_came(self, lease: int) -> None:
        if self.holder is None and self.lease == lease:
            self.let_go()

    def let_go(self) -> None:
        for key in list(self.workers):
            self.kill_worker(key, by_us=True)
        self.ended.clear()
        self.run, self.lease, self.holder = "", 0, None
        self.cluster.announce()

    def die(self) -> None:
        self.alive = False
        for worker in self.workers.values():
            worker.alive = False
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.lost(self)


@dataclass
class Cluster:
    """All hosts, and the engines that look at them."""

    time: VirtualTime
    rng: random.Random
    run: View
    training: Training
    orphan_s: float
    agents: list[SimAgent] = field(default_factory=list)
    engines: list[SimEngine] = field(default_factory=list)
    on_start: Callable[[SimEngine, wire.WorkerSpec], None] = lambda engine, spec: None
    _made: int = 0

    def next_pid(self) -> int:
        self._made += 1
        return self._made

    def add_host(self) -> None:
        number = self.next_pid()
        self.agents.append(SimAgent(self, f"host-{number}", f"slice-{number}"))
        self.announce()

    def alive(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.alive]

    def started(self, engine: SimEngine | None, spec: wire.WorkerSpec) -> None:
        assert engine is not None, "only who holds an agent starts workers"
        self.on_start(engine, spec)

    def announce(self) -> None:
        for engine in self.engines:
            engine.announce()

    def kill_host(self, agent: SimAgent) -> None:
        agent.die()
        self.announce()
        self.time.after(self.rng.uniform(1.0, 5.0), self.add_host)


class SimEngine:
    """An ``Engine`` (see there), as one driver process has it."""

    shares_machine = False
    brings_folder = False

    def __init__(self, process: Process, cluster: Cluster) -> None:
        self.process = process
        self.lease = 0
        self.ahead = 0.0
        """By how much the driver's clock is ahead of those of the hosts."""
        self._cluster = cluster
        self._sink: Sink | None = None
        self._run = ""
        self._up: dict[HostId, SimChannel] = {}
        self._down: dict[HostId, SimChannel] = {}
        cluster.engines.append(self)

    def whoami(self) -> str:
        return ""

    def is_dead(self, driver: str) -> bool:
        return False

    async def open(self, sink: Sink, ask: EngineRequest) -> None:
        self._sink, self._run, self.lease = sink, ask.run, ask.lease
        sink.on_capacity(self._views())

    def _agent(self, host: HostId) -> SimAgent:
        return next(agent for agent in self._cluster.agents if agent.host == host)

    def _views(self) -> tuple[HostView, ...]:
        return tuple(
            HostView(agent.host, agent.slice, 0, 1, free=agent.run in ("", self._run))
            for agent in self._cluster.alive()
        )

    def announce(self) -> None:
        sink = self._sink
        if sink is not None:
            self.process.later(0.01, lambda: sink.on_capacity(self._views()))

    def held(self) -> list[HostId]:
        return [agent.host for agent in self._cluster.alive() if agent.run == self._run and agent.lease]

    def claim(self, host: HostId) -> None:
        self.send(host, wire.Claim(self._run, self.lease, self._cluster.orphan_s, (0, 0)))

    def unclaim(self, host: HostId) -> None:
        self.send(host, wire.Unclaim(self.lease))

    def request_capacity(self, workers: int) -> None:
        pass

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        agents = [agent for agent in self._cluster.alive() if agent.slice in slices]
        for agent in agents:
            self.claim(agent.host)
        delay = self._cluster.rng.uniform(0.02, 0.2)
        sink = self._sink
        assert sink is not None
        if len(agents) == len(slices):
            self.process.later(delay, lambda: sink.on_reserved(reservation))
        else:
            self.process.later(delay, lambda: sink.on_reservation_failed(reservation, "a host is gone"))

    def release(self, slices: tuple[SliceName, ...]) -> None:
        for agent in self._cluster.alive():
            if agent.slice in slices:
                self.unclaim(agent.host)

    def retire(self, host: HostId) -> None:
        self.send(host, wire.Retire(self.lease))

    def send(self, host: HostId, message: wire.AnyToAgent) -> None:
        if not self.process.alive:
            return
        agent = self._agent(host)
        channel = self._down.setdefault(host, SimChannel(self._cluster.time, self._cluster.rng))
        channel.send(lambda: agent.hear(self, message))

    def hear(self, agent: SimAgent, message: wire.AnyFromAgent) -> None:
        sink = self._sink
        channel = self._up.setdefault(agent.host, SimChannel(self._cluster.time, self._cluster.rng))
        if sink is not None:
            channel.send(lambda: self.process.do(lambda: sink.on_message(agent.host, message)))

    def lost(self, agent: SimAgent) -> None:
        sink = self._sink
        if sink is not None:
            now = self._cluster.time.now + self.ahead
            failure = Failure(Kind.HOST_LOST, now, "connection broken", host=agent.host)
            self.process.later(0.01, lambda: sink.on_lost(agent.host, failure))

    def address(self, host: HostId) -> str:
        return "127.0.0.1"

    def time_here(self, host: HostId, at: float) -> float:
        return at + self.ahead

    def devices(self, host: HostId) -> tuple[str, ...]:
        return ()

    async def run_aside(self, work: Aside) -> bytes:
        number = zlib.crc32(work.code)
        await asyncio.sleep(number % 200 / 100)
        if number % 5 == 0:
            raise AsideDiedError("killed")
        return cast(bytes, cloudpickle.loads(work.code).run())

    async def close(self, *, keep_hosts: bool) -> None:
        if not keep_hosts:
            for agent in self._cluster.alive():
                if agent.holder is self:
                    self.unclaim(agent.host)
        self._sink = None

    def died(self) -> None:
        """The driver's process is gone."""
        self._sink = None
        for agent in self._cluster.alive():
            agent.lost_driver(self)
