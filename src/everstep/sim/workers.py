"""Simulated workers: they start, meet, step, save, fail, break each other, and stop, as far as a driver can
tell. What they save lies in the simulated store.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep.agent.spool import Spool
from everstep.driver.streams import Summary
from everstep.errors import StorageError
from everstep.failures import Kind
from everstep.protocol import framing, wire, worker_messages
from everstep.saved.reports import Part
from everstep.saved.snapshots import At
from everstep.sim.memory import SimCopy
from everstep.sim.saving import Saving
from everstep.sim.time import RuleBroken
from everstep.storage import restore

if TYPE_CHECKING:
    from everstep.sim.agents import SimAgent
    from everstep.sim.cluster import Cluster

_NO_LIMIT = 1 << 60
_PATIENCE_S = 30.0
"""How long a worker waits for a change to be agreed on."""


class SimLife(enum.StrEnum):
    SPAWNING = "spawning"
    JOINING = "joining"
    TRAINING = "training"
    RETURNED = "returned"
    DEAD = "dead"


class SimLine:
    """What a worker has said, kept by its agent until it is acknowledged."""

    def __init__(self) -> None:
        self.spool = Spool(Path("/nowhere"), in_memory=_NO_LIMIT, on_disk=_NO_LIMIT)
        self.state = b""
        self.uploaded: list[wire.Uploaded] = []
        """What the agent uploaded for it."""

    def add(self, data: bytes) -> int:
        offset = self.spool.end
        self.spool.append(data)
        return offset


class SaveWish:
    """Whether the worker should save now: it changes at the same call in all ranks of its group."""

    def __init__(self) -> None:
        self.holds = False
        self.held = 0
        """The report with whose commit it goes on, or 0."""
        self.pending: tuple[int, worker_messages.AnyValue] | None = None
        self._scheduled: list[tuple[int, worker_messages.AnyValue]] = []

    def agreed(self, message: worker_messages.Agree) -> None:
        if self.pending is not None and self.pending[0] == message.number:
            self._scheduled.append((message.start, self.pending[1]))
            self.pending = None

    def tire_of(self, number: int) -> None:
        if self.pending is not None and self.pending[0] == number:
            self.pending = None

    def at_call(self, call: int) -> bool:
        while self._scheduled and self._scheduled[0][0] <= call:
            value = self._scheduled.pop(0)[1]
            if isinstance(value, worker_messages.WantCheckpoint):
                self.holds = bool(value.reason)
        return self.holds


@dataclass
class OwnSnapshots:
    """What a worker knows of its snapshots."""

    kept: tuple[At, ...] = ()
    """Those that it may not write over."""
    open: At | None = None
    """The one that it has taken, and does not know what becomes of."""
    restored: SimCopy | None = None
    """The one that it started from."""


class SimWorker:
    """A worker process. Its group's tick moves it."""

    def __init__(self, agent: SimAgent, spec: wire.WorkerSpec, group: SimGroup) -> None:
        self.agent = agent
        self.spec = spec
        self.group = group
        self.pid = agent.cluster.next_number()
        self.line = SimLine()
        self.life = SimLife.SPAWNING
        self.step = 0
        self.reports = 0
        self.busy = 0
        """Something that it waits for before the next step: a save, a commit."""
        self.stuck = False
        """In a collective whose peers are gone."""
        self.hung = False
        """It makes no step any more, and says nothing."""
        self.moved = 0.0
        """When it was last seen to get on."""
        self.wish = SaveWish()
        self.own = OwnSnapshots()
        self.end: wire.Exited | None = None
        group.members.append(self)

    @property
    def rank(self) -> int:
        return self.spec.member.rank

    @property
    def running(self) -> bool:
        return self.life in (SimLife.SPAWNING, SimLife.JOINING, SimLife.TRAINING)

    @property
    def is_dead(self) -> bool:
        return self.life is SimLife.DEAD

    @property
    def cluster(self) -> Cluster:
        return self.agent.cluster

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """If it lives then, and once its host does something again."""

        def act() -> None:
            if self.life is SimLife.DEAD or not self.agent.alive:
                return
            if self.agent.frozen:
                self.agent.held_back.append(act)
            else:
                action()

        self.cluster.time.after(seconds, act)

    def send(self, message: msgspec.Struct) -> None:
        data = framing.frame(message)
        offset = self.line.add(data)
        spec = self.spec
        self.agent.send(wire.FromWorker(spec.epoch, spec.generation, self.rank, offset, data))

    # ------------------------------------------------------------------ starting

    def begin(self) -> None:
        cluster, spec = self.cluster, self.spec
        if not self.agent.template or cluster.chance(cluster.scenario.failed_spawn):
            cluster.fault()
            self.exit(1, None)
            return
        why_not = self._restore()
        if why_not is not None:
            cluster.fault()
            damaged = "" if spec.snapshot is not None else spec.checkpoint or ""
            self.send(
                worker_messages.Raised(why_not, "", False, cluster.time.now, False, damaged, spec.snapshot)
            )
            self.exit(1, None)
            return
        self.send(worker_messages.Hello(self.pid))
        self.life = SimLife.JOINING
        if cluster.chance(cluster.scenario.failed_rendezvous):
            cluster.fault()
            dies = lambda: self.crash(Kind.SIGNAL) if self.life is SimLife.JOINING else None  # noqa: E731
            self.later(cluster.rng.uniform(0.0, 2.0), dies)
            return
        self.group.meet()

    def _restore(self) -> str | None:
        """Why it can't; None: it has."""
        spec, cluster = self.spec, self.cluster
        if spec.snapshot is not None:
            return self._restore_snapshot(spec.snapshot)
        # A group that is replaced takes its state from a peer.
        peers = [w.step for w in cluster.training(spec.epoch) if w.group is not self.group]
        if spec.generation and peers:
            self.step = max(peers)
            return None
        if spec.checkpoint is not None:
            try:
                manifest = restore.verify(cluster.run.child(spec.checkpoint))
            except StorageError as error:
                return str(error)
            self.step = int(cluster.run.read(f"{spec.checkpoint}/{manifest.files[0].path}") or b"0")
        return None

    def _restore_snapshot(self, at: At) -> str | None:
        """Its own, or all of those that another number of ranks took together."""
        ranks = self.spec.snapshot_ranks
        same = ranks == self.spec.member.world_size
        parts = [self.agent.fetch(rank, at) for rank in ([self.rank] if same else range(ranks))]
        held = parts[0]
        if held is None or None in parts:
            return "its snapshot is gone"
        for peer in self.group.members:
            other = peer.own.restored
            if peer is not self and other is not None and other != held:
                raise RuleBroken(
                    f"10: rank {self.rank} restores step {held.step}, and rank {peer.rank} another: {other}"
                )
        self.own.restored = held
        self.step, self.own.kept = held.step, self.spec.kept
        return None

    def join(self) -> None:
        if self.life is SimLife.JOINING and not self.stuck:
            self.life = SimLife.TRAINING
            self.moved = self.cluster.time.now
            self.send(worker_messages.Joined())

    # ------------------------------------------------------------------ training

    def take_step(self, step: int) -> None:
        """Take a snapshot, which takes a while, and report."""
        cluster, scenario = self.cluster, self.cluster.scenario
        last = step >= scenario.steps
        self.busy += 1
        if (
            not (scenario.snapshots and self.spec.snapshot_every)
            or last
            or self.own.open is not None
            or cluster.chance(0.05)
        ):
            self._report(step, taken=False, taking=False)
            return
        slot = self.agent.memory.begin(self.rank, self.own.kept)
        if slot is None:
            self._report(step, taken=False, taking=False)
            return
        at = At(self.spec.epoch, self.reports + 1)
        copy = SimCopy(at, step, self.spec.member.world_size)
        pause = cluster.rng.uniform(0.0, 0.3 * scenario.step_s)
        if cluster.rng.random() < 0.5:
            self.own.open = at
            self._report(step, taken=False, taking=True)
            self.later(pause, partial(self._copied_behind, slot, copy))
        else:
            self.later(pause, partial(self._taken, slot, copy))

    def _taken(self, slot: int, copy: SimCopy) -> None:
        self.agent.memory.finish(self.rank, slot, copy)
        self.own.open = copy.at
        self._report(copy.step, taken=True, taking=False)

    def _copied_behind(self, slot: int, copy: SimCopy) -> None:
        """It was taken while training went on."""
        self.agent.memory.finish(self.rank, slot, copy)
        self.send(worker_messages.SnapshotTaken(copy.at.report, 0.0, 0.0))

    def _report(self, step: int, *, taken: bool, taking: bool) -> None:
        cluster, scenario = self.cluster, self.cluster.scenario
        self.step = step
        self.moved = cluster.time.now
        self.reports += 1
        index = self.reports
        asked = self.wish.at_call(index)
        raw = msgspec.Raw(self.metrics(index))
        report = worker_messages.Report(index, raw, taken=taken, taking=taking)
        saves = step % scenario.checkpoint_every == 0 or asked
        lacks = self.spec.assignment.group_rank != 0 and cluster.rng.random() < scenario.partless
        saving = Saving(self, index, step, asked)
        if saves:
            cluster.expect(saving.folder, self.rank, step, lacks=lacks)
        if not saves or lacks:
            self._reported(report)
            return
        if cluster.rng.random() < scenario.asynchronous:
            self._reported(msgspec.structs.replace(report, owed=True))
            cluster.time.after(cluster.rng.uniform(0.1, 20.0), saving.upload_behind)
        else:
            self.later(cluster.rng.uniform(0.0, 0.5), partial(saving.upload, report))

    def _reported(self, report: worker_messages.Report) -> None:
        self.send(report)
        self.busy -= 1

    def saved(self, report: worker_messages.Report, part: Part | None, why_not: str) -> None:
        index = report.index
        if part is not None and part.held and not self.group.undriven:
            # It makes no further step before the commit, for as long as it has to wait.
            self.busy += 1
            self.later(self.spec.hold_s, partial(self._let_go, index))
            self.wish.held = index
        self._reported(msgspec.structs.replace(report, part=part, owed=part is None))
        if part is None:
            self.send(worker_messages.PartFailed(index, why_not))

    def _let_go(self, index: int) -> None:
        if self.wish.held == index:
            self.wish.held = 0
            self.busy -= 1

    def finish(self) -> None:
        self.life = SimLife.RETURNED
        self.send(worker_messages.Returned(None))

    def metrics(self, index: int) -> bytes:
        spec = self.spec
        group, generation = spec.assignment.group_id, spec.generation
        return msgspec.msgpack.encode({"epoch": spec.epoch, "of": [group, generation], "x": index})

    # ------------------------------------------------------------------ messages from the driver

    def received(self, message: worker_messages.AnyToWorker) -> None:
        if self.life is SimLife.DEAD:
            return
        match message:
            case worker_messages.Propose():
                self.wish.pending = (message.number, message.value)
                self.send(worker_messages.Counted(message.number, self.reports))
                self.later(_PATIENCE_S, partial(self.wish.tire_of, message.number))
            case worker_messages.Agree():
                self.wish.agreed(message)
            case worker_messages.Kept():
                self.own.kept = message.kept
                if self.own.open is not None and self.own.open <= message.upto:
                    self.own.open = None
            case worker_messages.CheckpointSettled():
                self._let_go(message.index)
            case _:
                pass

    # ------------------------------------------------------------------ failing

    def crash(self, kind: Kind) -> None:
        if not self.running or not self.agent.alive or self.agent.frozen:
            return
        match kind:
            case Kind.EXCEPTION:
                self.raise_("boom", echo=False)
            case Kind.EXIT:
                self.exit(3, None)
            case Kind.OOM:
                self.exit(None, 9, oom=True)
            case _:
                self.exit(None, 9)

    def raise_(self, message: str, *, echo: bool) -> None:
        joined = self.life is SimLife.TRAINING
        self.send(worker_messages.Raised(message, "", echo, self.cluster.time.now, joined))
        self.exit(1, None)

    def exit(self, code: int | None, signal: int | None, *, by_us: bool = False, oom: bool = False) -> None:
        """The process is gone, and its agent reports it."""
        if self.life is SimLife.DEAD:
            return
        self.die()
        spec, now = self.spec, self.cluster.time.now
        self.end = wire.Exited(
            spec.epoch, spec.generation, self.rank, now, code, signal, by_us, oom, 0, "", spec.log_path
        )
        self.agent.ended(self)

    def die(self) -> None:
        """Collectives of its peers fail after a while, or hang."""
        was_running, self.life = self.running, SimLife.DEAD
        self.group.members.remove(self)
        if was_running:
            self.group.miss()


def acknowledged_rows(worker: SimWorker) -> set[bytes]:
    """What the driver said that it has dealt with."""
    state = worker.line.state
    upto = msgspec.msgpack.decode(state, type=Summary).upto if state else 0
    return {worker.metrics(index) for index in range(1, upto + 1)}


class SimGroup:
    """One incarnation of a replica group: its workers step together, or not at all."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.members: list[SimWorker] = []
        """Those whose process is there."""

    @property
    def undriven(self) -> bool:
        return any(worker.agent.holder is None for worker in self.members)

    def meet(self) -> None:
        """They join once all of them are there."""
        peers, rng = self.members, self._cluster.rng
        if len(peers) == peers[0].spec.member.group_size and all(w.life is SimLife.JOINING for w in peers):
            for peer in peers:
                peer.later(rng.uniform(0.01, 0.5), peer.join)
            self._cluster.time.after(rng.uniform(0.5, 1.0), self._tick)

    def _tick(self) -> None:
        """One step of all of its workers, or of none."""
        peers, scenario = self.members, self._cluster.scenario
        if not peers or len(peers) < peers[0].spec.member.group_size or any(w.stuck or w.hung for w in peers):
            return  # it will not step again
        if all(w.life is SimLife.TRAINING and not w.agent.frozen for w in peers) and not self._waits():
            step = peers[0].step + 1
            if peers[0].step >= scenario.steps:
                for worker in peers:
                    worker.finish()
                return
            for worker in [*peers]:
                worker.take_step(step)
        self._cluster.time.after(scenario.step_s * self._cluster.rng.uniform(0.9, 1.1), self._tick)

    def _waits(self) -> bool:
        """A save is under way, or a commit is waited for; or a rank doesn't know what becomes of its last
        snapshot, or when a change is to hold, while there is somebody to tell it.
        """
        driven = not self.undriven
        return any(
            w.busy or (driven and (w.own.open is not None or w.wish.pending is not None))
            for w in self.members
        )

    def miss(self) -> None:
        """One of them is gone."""
        rng = self._cluster.rng
        for peer in self.members:
            if peer.life in (SimLife.JOINING, SimLife.TRAINING) and not peer.stuck:
                peer.stuck = True
                if rng.random() < 0.6:
                    recognised = rng.random() < 0.8
                    peer.later(rng.uniform(0.001, 3.0), partial(self.echo, peer, recognised))

    def echo(self, worker: SimWorker, recognised: bool) -> None:
        """Its collective fails: by its peers' fault, which is recognised or not."""
        if worker.running and worker.agent.alive and not worker.agent.frozen:
            worker.raise_("connection closed by peer", echo=recognised)

    def stands_still(self, worker: SimWorker) -> bool:
        """It hangs, or waits for one that does, or that is gone."""
        return worker.stuck or any(peer.hung for peer in self.members)
