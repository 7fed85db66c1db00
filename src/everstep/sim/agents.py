"""Simulated agents: one on each host. They speak the wire protocol, keep what a worker said until it is
acknowledged, tell a later driver again, and let workers train on while nobody drives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, assert_never

from everstep.failures import Kind
from everstep.health.vitals import Finding, StackPlace, Stage, Vitals
from everstep.protocol import framing, wire, worker_messages
from everstep.protocol.peer_messages import PeerAddress
from everstep.saved.reports import Part
from everstep.saved.snapshots import At
from everstep.sim.memory import SimCopy, SimMemory
from everstep.sim.time import RuleBroken
from everstep.sim.workers import SimLife, SimWorker
from everstep.topology.slices import HostId

if TYPE_CHECKING:
    from everstep.sim.cluster import Cluster, SimSlice
    from everstep.sim.engine import SimEngine

_PRESENT = (SimLife.TRAINING, SimLife.RETURNED)


class SimAgent:
    """A host's agent, and its host. It outlives drivers."""

    def __init__(self, cluster: Cluster, host: HostId, slice_: SimSlice, index: int) -> None:
        self.cluster = cluster
        self.host = host
        self.slice = slice_
        self.index = index
        self.died = math.inf
        self.frozen = False
        self.lost = False
        """It was silent, or is dead."""
        self.template = False
        self.claim = wire.Claim("", 0, 0.0, (0, 0))
        """The one that holds it; of no run: nobody's does."""
        self.holder: SimEngine | None = None
        self.workers: dict[tuple[int, int], SimWorker] = {}
        self.gone: dict[tuple[int, int], SimWorker] = {}
        """Those that have ended: a later driver must learn of it."""
        self.memory = SimMemory()
        self.held_back: list[Callable[[], None]] = []
        """What reaches a frozen host, or would leave it, waits until it thaws."""
        self.stuck: Stuck = Stuck()

    @property
    def alive(self) -> bool:
        return self.died == math.inf

    @property
    def listed(self) -> bool:
        return self.alive and not self.lost

    @property
    def emptying(self) -> bool:
        """Nobody holds it, and nobody can before its workers are gone."""
        return not self.claim.run and any(w.running for w in self.workers.values())

    def send(self, message: wire.AnyFromAgent) -> None:
        if self.holder is None or not self.alive:
            return
        if self.frozen:
            self.held_back.append(partial(self.send, message))
        else:
            self.holder.received(self, message)

    def received(self, engine: SimEngine, message: wire.AnyToAgent) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.held_back.append(partial(self.received, engine, message))
            return
        match message:
            case wire.Attach():
                pass
            case _ if self.emptying:
                self.stuck.undelivered.append((engine, message))
            case wire.Claim():
                self._claimed(engine, message)
            case wire.Retire() if not self.claim.run:
                self.cluster.emptied(self)
            case _ if message.lease < self.claim.lease or engine is not self.holder:
                pass  # orders of a driver that was replaced don't count
            case wire.Unclaim():
                self.let_go()
            case wire.Retire():
                pause = self.cluster.rng.uniform(0.01, 1.0)
                self.cluster.time.after(pause, partial(self._come_back, engine))
            case wire.Prepare():
                self._prepare()
            case wire.Start():
                self._start(message)
            case wire.CopySlot():
                pause = self.cluster.rng.uniform(0.0, 2.0 * self.cluster.scenario.step_s)
                self.cluster.time.after(pause, partial(_copy, self, message))
            case wire.KeepSlots():
                self.memory.keep_copies(message.kept)
            case wire.Stop():
                self._stop(message)
            case wire.ToWorkers():
                _pass_on(self, message)
            case wire.Acknowledge():
                _acknowledge(self, message)
            case wire.Examine():
                examine(self, message)
            case wire.RunLighthouse() | wire.Forward():
                pass
            case _:
                assert_never(message)

    def thaw(self) -> None:
        self.frozen = False
        waiting, self.held_back = self.held_back, []
        for action in waiting:
            action()

    # ------------------------------------------------------------------ drivers

    def _claimed(self, engine: SimEngine, message: wire.Claim) -> None:
        engine.connected.add(self.host)
        if self.claim.run not in ("", message.run) or message.lease < self.claim.lease:
            engine.received(self, _status(self))
            return
        later = message.lease > self.claim.lease > 0
        self.claim, self.holder = message, engine
        if later:
            _be_slow_to_answer(self)
        _send_status(self)
        if later:
            for worker in self.workers.values():
                worker.wish.pending = None
            self._hand_over()
        if not engine.is_open:  # its last message: the connection is closed
            self.lost_driver(engine)

    def _hand_over(self) -> None:
        everybody = [*self.gone.values(), *self.workers.values()]
        held = [
            wire.Held(w.spec, w.pid, w.line.spool.acknowledged, w.line.state, w.pid in self.stuck.stopping)
            for w in everybody
        ]
        if not self.template:
            self.send(wire.Unprepared(Kind.TEMPLATE, "had died", ""))
        self.send(wire.Inventory(held, copies=self.memory.copies()))
        _be_slow(self)
        for worker in everybody:
            spec = worker.spec
            for offset, data in worker.line.spool.chunks():
                self.send(wire.FromWorker(spec.epoch, spec.generation, worker.rank, offset, data))
            for uploaded in worker.line.uploaded:
                self.send(uploaded)
            if worker.end is not None:
                self.send(worker.end)
        self.send(wire.HandedOver())

    def lost_driver(self, engine: SimEngine) -> None:
        """Its connection has broken."""
        if self.frozen:
            self.held_back.append(partial(self.lost_driver, engine))
            return
        engine.connected.discard(self.host)
        self.stuck.undelivered = [(by, sent) for by, sent in self.stuck.undelivered if by is not engine]
        if engine is self.holder:
            self.holder = None
            for worker in self.workers.values():
                worker.wish.pending = None
            self.cluster.time.after(self.claim.orphan_s, partial(self._nobody_came, self.claim.lease))

    def _nobody_came(self, lease: int) -> None:
        if self.holder is None and self.claim.lease == lease:
            self.let_go()

    def let_go(self) -> None:
        """End all workers, and be free again."""
        if self.frozen:
            self.held_back.append(self.let_go)
            return
        self.claim, self.holder = wire.Claim("", 0, 0.0, (0, 0)), None
        _send_status(self)
        if self.stuck.told_to_end(self.workers.values()):
            self.stuck.waiting.append(self._emptied)
            self.cluster.announce()
        else:
            self._emptied()

    def _emptied(self) -> None:
        if self.frozen:
            self.held_back.append(self._emptied)
        elif self.alive and not self.claim.run:
            self.empty()
            _send_status(self)
            self.cluster.emptied(self)
            undelivered, self.stuck.undelivered = self.stuck.undelivered, []
            for engine, message in undelivered:
                self.received(engine, message)

    def _come_back(self, engine: SimEngine) -> None:
        """It counted as lost. Once its workers have ended, it is used again."""
        if not self.alive or not (self.lost or self.host in engine.retired):
            return
        if self.frozen:
            self.held_back.append(partial(self._come_back, engine))
        elif self.stuck.told_to_end(self.workers.values()):
            self.stuck.waiting.append(partial(self._come_back, engine))
        else:
            for worker in [*self.workers.values()]:
                worker.exit(None, 9, by_us=True)
            self.cluster.emptied(self)

    def empty(self) -> None:
        """Nothing of any run is left here."""
        for worker in [*self.workers.values()]:
            worker.die()
        self.workers.clear()
        self.gone.clear()
        self.memory.clear()
        self.template = False

    # ------------------------------------------------------------------ workers

    def _prepare(self) -> None:
        cluster = self.cluster
        scenario, pause = cluster.scenario, cluster.rng.uniform(0.1, 3.0)
        lease = self.claim.lease
        if cluster.chance(scenario.failed_preparation):
            cluster.fault()
            kind = Kind.START if cluster.rng.random() < 0.8 else Kind.TEMPLATE
            cluster.time.after(pause, partial(self.send, wire.Unprepared(kind, "import failed", "")))
        elif cluster.chance(scenario.hung_preparation):
            cluster.fault()
        elif scenario.unloadable:
            missing = wire.Unprepared(Kind.LOAD, "No module named 'x'", "")
            cluster.time.after(pause, partial(self.send, missing))
        else:
            cluster.time.after(pause, partial(self._prepared, lease))

    def _prepared(self, lease: int) -> None:
        if self.alive and self.claim.lease == lease:
            self.template = True
            self.send(wire.Prepared(True, "", 0.1))

    def kill_template(self) -> None:
        """Its workers die with it. Agents should report that first, and may not get to."""
        if not self.template or self.frozen:
            return
        self.template = False
        sent = wire.Unprepared(Kind.TEMPLATE, "SIGKILL", "")
        first = self.cluster.rng.random() < 0.5
        if first:
            self.send(sent)
        for worker in [*self.workers.values()]:
            worker.crash(Kind.SIGNAL)
        if not first:
            self.cluster.fault()  # it may be seen as a start that fails
            self.send(sent)

    def _start(self, message: wire.Start) -> None:
        epochs = {spec.epoch for spec in message.workers}
        if any(max(epochs) > epoch for epoch, _ in self.gone):
            self.gone.clear()
            kept = {at for spec in message.workers for at in spec.kept}
            self.memory.retain({spec.member.rank for spec in message.workers}, kept)
        self.memory.sources = message.sources
        for spec in message.workers:
            key = (spec.epoch, spec.member.rank)
            self.gone.pop(key, None)
            worker = SimWorker(self, spec, self.cluster.group_of(spec))
            self.workers[key] = worker
            self.cluster.started(self, spec)
            if self.template:
                self.send(wire.Spawned(spec.epoch, spec.generation, worker.rank, worker.pid))
            worker.later(self.cluster.rng.uniform(0.05, 0.3), worker.begin)

    def fetch(self, rank: int, at: At) -> SimCopy | None:
        """What a rank had then, from here or from another host. None: it is gone."""
        held = self.memory.find(rank, at)
        for source in self.memory.sources.get(rank, [PeerAddress(self.host)]):
            peer = self.cluster.hosts[source.address]
            found = peer.memory.find(rank, at)
            if found is None and peer.listed and peer.claim.run:
                raise RuleBroken(f"10: {peer.host} is to have rank {rank} of {at}, and doesn't")
            if not peer.frozen:
                held = held or found
        return held

    def knows(self, worker: SimWorker) -> bool:
        key = (worker.spec.epoch, worker.rank)
        return self.workers.get(key) is worker or self.gone.get(key) is worker

    def _stop(self, message: wire.Stop) -> None:
        ranks = [(message.epoch, rank) for rank in message.ranks]
        mine = [w for key in ranks if (w := self.workers.get(key)) is not None]
        mine = [w for w in mine if w.spec.generation == message.generation]
        self.stuck.stopping |= {w.pid for w in mine}
        if self.stuck.is_stuck and any(w.running for w in mine):
            self.stuck.waiting.append(partial(self._stop, message))
            return
        rng = self.cluster.rng
        pause = rng.uniform(0.001, 0.05) + message.grace_s * rng.random()
        self.cluster.time.after(pause, partial(self._stopped, message, mine))

    def _stopped(self, message: wire.Stop, workers: list[SimWorker]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.held_back.append(partial(self._stopped, message, workers))
            return
        for worker in workers:
            worker.exit(None, 9, by_us=True)
        self.send(wire.Gone(message.epoch, message.generation, message.ranks, self.memory.copies()))

    def ended(self, worker: SimWorker) -> None:
        key = (worker.spec.epoch, worker.rank)
        if self.workers.get(key) is worker:
            del self.workers[key]
            self.gone[key] = worker
        assert worker.end is not None
        self.send(worker.end)
        if not self.claim.run and not self.emptying:
            self._emptied()

    def uploaded(self, worker: SimWorker, index: int, part: Part | None, why_not: str) -> None:
        spec = worker.spec
        sent = wire.Uploaded(spec.epoch, spec.generation, worker.rank, index, part, why_not)
        worker.line.uploaded.append(sent)
        self.send(sent)


class Stuck:
    """Workers of a host that can't be killed: they hang in the kernel."""

    def __init__(self) -> None:
        self.is_stuck = False
        self.waiting: list[Callable[[], None]] = []
        """What is done as soon as they can."""
        self.stopping: set[int] = set()
        """Workers that were told to end, by pid."""
        self.undelivered: list[tuple[SimEngine, wire.AnyToAgent]] = []
        """What drivers said while nobody could hold their host."""

    def told_to_end(self, workers: Iterable[SimWorker]) -> bool:
        """All of them are. True if some can't be killed now."""
        running = {worker.pid for worker in workers if worker.running}
        self.stopping |= running
        return self.is_stuck and bool(running)

    def end(self) -> None:
        self.is_stuck = False
        waiting, self.waiting = self.waiting, []
        for action in waiting:
            action()


def _status(agent: SimAgent) -> wire.Status:
    claim = agent.claim
    return wire.Status(agent.host, wire.WIRE_VERSION, 0, claim.run, claim.lease, len(agent.workers))


def _send_status(agent: SimAgent) -> None:
    """Also to drivers that were replaced: so one without storage learns of that."""
    for engine in agent.cluster.engines:
        if agent.host in engine.connected:
            engine.received(agent, _status(agent))


def lose_orders(agent: SimAgent) -> None:
    """Its driver's connection broke while it was away: what was sent to it meanwhile never arrives."""
    orders = [action for action in agent.held_back if getattr(action, "func", None) == agent.received]
    agent.held_back = [action for action in agent.held_back if action not in orders]


def _be_slow(agent: SimAgent) -> None:
    """What it has kept may be so much that the driver goes on before it has received all of it."""
    cluster, lease = agent.cluster, agent.claim.lease
    draw = random.Random(f"hand-over of {agent.host} in {cluster.scenario.seed}, {lease}")
    if draw.random() < 0.1 and agent.holder is not None and not cluster.calm:
        longest = 4.0 * cluster.scenario.deadlines.heartbeat_timeout_s
        agent.holder.channels_from[agent.host].lag(draw.uniform(0.0, longest))


def _be_slow_to_answer(agent: SimAgent) -> None:
    """Its machine is so busy that it may come too late."""
    cluster, lease = agent.cluster, agent.claim.lease
    draw = random.Random(f"answer of {agent.host} in {cluster.scenario.seed}, {lease}")
    if draw.random() < 0.05 and agent.holder is not None and not cluster.calm:
        longest = 1.5 * cluster.scenario.deadlines.take_over_s
        agent.holder.channels_from[agent.host].lag(draw.uniform(0.0, longest))


def _place(worker: SimWorker) -> StackPlace:
    waits = not worker.hung and worker.group.stands_still(worker)
    return StackPlace.COLLECTIVE if waits else StackPlace.WORKING


def _vitals(worker: SimWorker) -> Vitals:
    """A step may take any time, and is work all the while."""
    quiet = worker.cluster.time.now - worker.moved
    still = quiet if worker.group.stands_still(worker) else 0.0
    trains = Stage.TRAINING if worker.reports else Stage.FIRST_STEP
    stage = Stage.RETURNED if worker.life is SimLife.RETURNED else trains
    usual = min(quiet, worker.cluster.scenario.step_s)
    return Vitals(
        worker.rank, worker.spec.generation, stage, quiet, still, still, 0.0, usual, 0.0, worker.reports, 0
    )


def measure_progress(agent: SimAgent, quiet_s: float) -> None:
    """Tell of workers that are quiet, at work or not."""
    if not agent.alive or agent.frozen:
        return
    training = [w for w in agent.workers.values() if w.life is SimLife.TRAINING]
    late = [v for w in training if (v := _vitals(w)).quiet_s >= quiet_s]
    if late:
        agent.send(wire.Quiet(max(w.spec.epoch for w in training), late))


def examine(agent: SimAgent, message: wire.Examine) -> None:
    mine = [w for w in agent.workers.values() if w.spec.epoch == message.epoch and w.life in _PRESENT]
    sent = wire.Examined(message.epoch, message.check, [Finding(_vitals(w), _place(w)) for w in mine])
    agent.cluster.time.after(agent.cluster.rng.uniform(0.1, 2.0), partial(agent.send, sent))


def _pass_on(agent: SimAgent, message: wire.ToWorkers) -> None:
    for body in framing.Frames().feed(message.body):
        sent = worker_messages.to_worker.decode(body)
        for rank in message.ranks:
            worker = agent.workers.get((message.epoch, rank))
            if worker is not None:
                worker.received(sent)


def _acknowledge(agent: SimAgent, message: wire.Acknowledge) -> None:
    for generation, rank, offset, state in message.ranks:
        key = (message.epoch, rank)
        worker = agent.workers.get(key) or agent.gone.get(key)
        if worker is not None and worker.spec.generation == generation:
            worker.line.spool.acknowledge(offset)
            worker.line.state = state


def _copy(agent: SimAgent, order: wire.CopySlot) -> None:
    """Have a copy of what another host has."""
    if not agent.alive or not agent.claim.run:
        return
    if agent.frozen:
        agent.held_back.append(partial(_copy, agent, order))
        return
    source = agent.cluster.hosts[order.source.address]
    held = None if source.frozen else source.memory.find(order.rank, order.at)
    if held is None or agent.cluster.chance(0.02):
        agent.send(wire.SlotCopied(order.rank, order.at, 0.0, "is not there"))
        return
    if agent.memory.find(order.rank, order.at) is None:
        agent.memory.add_copy(order.rank, held)
    agent.send(wire.SlotCopied(order.rank, order.at, 0.1))
