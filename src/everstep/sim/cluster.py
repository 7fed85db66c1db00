"""The simulated cluster: slices and their hosts, how they come, go, freeze and are noticed of it, and the
engines that look at them. It knows nothing of what a controller intends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from everstep.failures import Kind
from everstep.identity import Incarnation
from everstep.protocol import wire
from everstep.sim.agents import SimAgent
from everstep.sim.disk import View
from everstep.sim.engine import SimEngine
from everstep.sim.scenario import Scenario
from everstep.sim.time import VirtualTime
from everstep.sim.workers import SimGroup, SimLife, SimWorker
from everstep.topology.slices import HostId, HostView, SliceName


class SimSlice:
    def __init__(self, name: SliceName) -> None:
        self.name = name
        self.hosts: list[SimAgent] = []
        self.other = False
        """Another job has it."""
        self.present = True
        self.doomed = False
        """It is being taken away at this moment."""
        self.deadline: float | None = None
        """Of the notice that was given, and has not come true or been cancelled."""

    @property
    def whole(self) -> bool:
        return self.is_whole(lambda host: host.listed)

    def is_whole(self, lists: Callable[[SimAgent], bool]) -> bool:
        return self.present and all(map(lists, self.hosts))


class Saves:
    """What workers save, as they know it."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        """How far training was, by folder."""
        self.shards: dict[str, set[int]] = {}
        """The ranks that have something to add, by folder."""


class Cluster:
    def __init__(self, time: VirtualTime, rng: random.Random, run: View, scenario: Scenario) -> None:
        self.time = time
        self.rng = rng
        self.run = run
        """The run's storage, as workers have it."""
        self.scenario = scenario
        self.slices: dict[SliceName, SimSlice] = {}
        self.hosts: dict[HostId, SimAgent] = {}
        self.engines: list[SimEngine] = []
        self.on_start: Callable[[SimAgent, wire.WorkerSpec], None] = lambda agent, spec: None
        self.saves = Saves()
        self.calm = False
        """Faults are over: nothing fails by itself any more."""
        self.charges = 0
        """How many things happened that may cost a recovery."""
        self.unheard = False
        """Hosts got notices while no driver lived, or it slept, and may be gone before it receives them."""
        self.hung: set[tuple[int, int]] = set()
        """(epoch, rank) of all that ever hung: messages about it may come after their host is gone."""
        self._groups: dict[Incarnation, SimGroup] = {}
        self._made = 0
        for number in range(scenario.slices):
            self.add_slice(f"slice-{number}")

    def next_number(self) -> int:
        self._made += 1
        return self._made

    def chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    def fault(self) -> None:
        self.charges += 1

    # ------------------------------------------------------------------ what is there

    def view(self, run: str, lists: Callable[[SimAgent], bool]) -> tuple[HostView, ...]:
        """As an engine of this run sees it, for which these hosts are there."""
        scenario = self.scenario
        return tuple(
            HostView(
                agent.host,
                s.name,
                agent.index,
                scenario.slots,
                scenario.hosts_per_slice,
                alive=lists(agent),
                free=not s.other and agent.claim.run in ("", run) and not agent.emptying,
            )
            for s in self.slices.values()
            if s.present
            for agent in s.hosts
        )

    def announce(self) -> None:
        for engine in self.engines:
            engine.announce()

    def workers(self) -> Iterator[SimWorker]:
        for agent in self.hosts.values():
            yield from agent.workers.values()

    def training(self, epoch: int) -> list[SimWorker]:
        return [w for w in self.workers() if w.spec.epoch == epoch and w.life is SimLife.TRAINING]

    def group_of(self, spec: wire.WorkerSpec) -> SimGroup:
        key = Incarnation(spec.epoch, spec.assignment.group_id, spec.generation)
        return self._groups.setdefault(key, SimGroup(self))

    def started(self, agent: SimAgent, spec: wire.WorkerSpec) -> None:
        self.on_start(agent, spec)

    def expect(self, folder: str, rank: int, step: int, *, lacks: bool) -> None:
        """``lacks``: the rank has nothing to add. One of the same name may have had something, if a damaged
        journal has lost that there was such an attempt.
        """
        shards = self.saves.shards.setdefault(folder, set())
        if lacks:
            shards.discard(rank)
        else:
            self.saves.steps[folder] = step
            shards.add(rank)

    # ------------------------------------------------------------------ capacity

    def add_slice(self, name: SliceName) -> None:
        """A slice appears, or one that has lost hosts gets new machines in their places."""
        slice_ = self.slices.setdefault(name, SimSlice(name))
        old = {agent.index: agent for agent in slice_.hosts if agent.alive}
        slice_.hosts = [old.get(i) or self._new_host(slice_, i) for i in range(self.scenario.hosts_per_slice)]
        slice_.present, slice_.doomed = True, False
        self.announce()

    def _new_host(self, slice_: SimSlice, index: int) -> SimAgent:
        agent = SimAgent(self, f"{slice_.name}/{index}#{self.next_number()}", slice_, index)
        self.hosts[agent.host] = agent
        return agent

    def remove_slice(self, slice_: SimSlice, loud: bool = True) -> None:
        if slice_.present:
            slice_.present = False
            for agent in slice_.hosts:
                self.kill_host(agent, loud)
            self.announce()

    def other_job(self, slice_: SimSlice, takes: bool) -> None:
        if slice_.other is not takes and not (takes and any(a.claim.run or a.emptying for a in slice_.hosts)):
            slice_.other = takes
            self.announce()

    # ------------------------------------------------------------------ losing hosts

    def kill_host(self, agent: SimAgent, loud: bool) -> None:
        if not agent.alive:
            return
        agent.died = self.time.now
        agent.empty()
        pause = self.rng.uniform(0.001, 0.2) if loud else self.scenario.deadlines.heartbeat_timeout_s
        self.time.after(pause, partial(self._lost, agent, loud, self.time.now))

    def _lost(self, agent: SimAgent, loud: bool, happened: float) -> None:
        if agent.lost or (agent.alive and not agent.frozen):
            return
        if agent.alive and any(engine.patience.is_needed for engine in self.engines):
            self._wait_for_loss(agent, happened)
            return
        agent.lost = True
        kind = Kind.HOST_LOST if loud else Kind.HOST_SILENT
        for engine in self.engines:
            engine.lost(agent, kind, happened)
        self.announce()

    def freeze(self, agent: SimAgent, seconds: float) -> None:
        """Its peers wait for it, or their collectives give up first."""
        if not agent.alive or agent.frozen:
            return
        agent.frozen = True
        for worker in [w for w in agent.workers.values() if w.running]:
            for peer in worker.group.members:
                if peer.agent is not agent and self.rng.random() < 0.3:
                    tired = partial(_tire_of_waiting, agent, peer)
                    self.time.after(self.rng.uniform(0.1, 5.0), tired)
        self._wait_for_loss(agent, self.time.now)
        self.time.after(seconds, partial(self.thaw, agent))

    def _wait_for_loss(self, agent: SimAgent, silent_since: float) -> None:
        limit = self.scenario.deadlines.heartbeat_timeout_s
        self.time.after(limit, partial(self._lost, agent, False, silent_since))

    def hear_again(self) -> None:
        """A driver that is new knows of no silence before it."""
        for agent in self.hosts.values():
            if agent.alive and agent.frozen and agent.lost:
                agent.lost = False
                self._wait_for_loss(agent, self.time.now)

    def thaw(self, agent: SimAgent) -> None:
        if agent.frozen and agent.alive:
            agent.thaw()
            holder = agent.holder
            if agent.lost and (holder is None or not holder.is_open):  # nobody will ask it to
                agent.lost = False
                self.announce()

    def emptied(self, agent: SimAgent) -> None:
        """All has ended there: drivers that waited for that may use it again."""
        agent.lost = False
        for engine in self.engines:
            engine.retired.discard(agent.host)
        self.announce()

    # ------------------------------------------------------------------ notices

    def notice(self, slice_: SimSlice, deadline: float, every_host: bool) -> None:
        slice_.deadline = deadline
        for agent in slice_.hosts if every_host else slice_.hosts[:1]:
            for engine in self.engines:
                engine.notice(agent, deadline)

    def cancel_notice(self, slice_: SimSlice) -> None:
        slice_.deadline = None
        for engine in self.engines:
            engine.notice(slice_.hosts[0], None)


def _tire_of_waiting(awaited: SimAgent, worker: SimWorker) -> None:
    if awaited.frozen:
        worker.group.echo(worker, True)
