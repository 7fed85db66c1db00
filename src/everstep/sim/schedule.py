"""One schedule, from its scenario to its end. The same seed is the same schedule."""

from __future__ import annotations

import random
from collections.abc import Callable

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller
from everstep.control.table import Phase
from everstep.protocol import wire
from everstep.sim.agents import SimAgent
from everstep.sim.cluster import Cluster
from everstep.sim.disk import Disk, View
from everstep.sim.faults import ScheduledFaults
from everstep.sim.invariants import ControllerRules, RunFacts, check_host, check_rest
from everstep.sim.rules import RUN, Rules
from everstep.sim.scenario import FaultKind, Scenario
from everstep.sim.seats import TTL_S, Seat, Seats
from everstep.sim.story import Story
from everstep.sim.time import RuleBroken, VirtualTime, require
from everstep.sim.workers import acknowledged_rows

_REST_S = 300.0


class Schedule:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.story = Story()
        self._time = VirtualTime()
        rng = random.Random(f"world {scenario.seed}")
        self._disk = Disk(rng, lambda: self._time.now)
        self._rules = Rules(self._disk)
        self._rules.keep = scenario.keep
        self._cluster = Cluster(self._time, rng, View(self._disk, RUN), scenario)
        self._rules.shards = self._cluster.saves.shards
        self._cluster.on_start = self._workers_start
        self._seats = Seats(
            scenario, self._time, rng, self._cluster, self._disk, self._rules, self.story, self._watch
        )
        self._faults = ScheduledFaults(scenario, self._time, self._cluster, self._seats, self.story)
        self.facts = RunFacts()
        self._invariants: dict[str, ControllerRules] = {}
        """By driver."""
        self._started: set[tuple[int, int, int]] = set()
        """(epoch, generation, rank) of every worker that there was."""

    # ------------------------------------------------------------------ watching

    def _watch(self, seat: Seat, controller: Controller) -> None:
        """Every event that this controller handles is seen here, with what it answers."""
        invariants = ControllerRules(self._scenario, self._cluster, self.facts, controller)
        self._invariants[seat.name] = invariants
        to, of = f"{seat.name} →", f"{seat.name} ←"
        handle: Callable[[e.Event], list[c.AnyCommand]] = controller.handle

        def watched(event: e.Event) -> list[c.AnyCommand]:
            now = self._time.now
            self.story.add(now, to, event)
            commands = handle(event)
            for command in commands:
                self.story.add(now, of, command)
                if isinstance(command, c.PhaseChanged):
                    self._faults.entered(Phase(command.phase))
            # A driver that was replaced, and does not know it yet, is wrong about many things, and may be. In
            # one that has given up, nothing is left that would carry out its commands.
            if (self._rules.owner == seat.name and seat.lives) or isinstance(event, e.LeaseLost):
                try:
                    if isinstance(event, e.RunOpened) and event.adopted is not None:
                        self._check_adopted(event.adopted)
                    invariants.after(event, commands, now)
                except RuleBroken as broken:
                    self._time.failed(broken)  # also if the driver catches it
                    raise
            return commands

        setattr(controller, "handle", watched)  # noqa: B010 (a method of this one only)

    def _check_adopted(self, adopted: e.Adopted) -> None:
        """2: workers that were replaced don't train on."""
        last: dict[int, int] = {}
        for epoch, generation, rank in self._started:
            if epoch == adopted.epoch:
                last[rank] = max(last.get(rank, 0), generation)
        known = dict(adopted.generations)
        for a in adopted.assignments:
            agent, key = self._cluster.hosts[a.host], (adopted.epoch, a.rank)
            worker = agent.workers.get(key) or agent.gone.get(key)
            mine = None if worker is None else worker.spec.generation
            require(
                mine in (None, last[a.rank]) and known[a.group_id] == last[a.rank],
                f"2: rank {a.rank} of generation {mine} is adopted, and {last[a.rank]} was begun",
            )

    def _workers_start(self, agent: SimAgent, spec: wire.WorkerSpec) -> None:
        check_host(agent)
        key = (spec.epoch, spec.generation, spec.member.rank)
        require(key not in self._started, f"{key} is started twice")
        self._started.add(key)
        seat = next(seat for seat in self._seats.every if seat.engine is agent.holder)
        seat.first_epoch = seat.first_epoch or spec.epoch
        begins = spec.epoch == seat.first_epoch and not spec.generation and spec.snapshot is None
        in_order = self._scenario.settings.group_size is None
        self._rules.check_start(spec.checkpoint, seat.at_least if begins and in_order else None)

    # ------------------------------------------------------------------ from beginning to end

    def run(self) -> None:
        """Raises ``RuleBroken``, or any error that a wrong driver may raise."""
        View(self._disk, RUN).create(".markers/x", b"")
        self._faults.schedule()
        self._seats.start()
        self._seats.look_after()
        try:
            self._time.run(self._scenario.fault_s)
            self._check_recovery()
            self._time.over = False
            self._faults.calm()
            self._time.run(self._time.now + _REST_S)
            check_rest(self._cluster)
            self._rules.check_end()
            self._check_rows()
        finally:
            self._seats.bury()

    @property
    def outcome(self) -> c.Outcome | None:
        """How the run has ended, if it has."""
        return self._seats.outcome

    def journal(self) -> bytes:
        """All that is left of it."""
        return b"".join(self._disk.objects[name] for name in self._disk.below(f"{RUN}journal/"))

    def _check_recovery(self) -> None:
        """7: with enough capacity and no more faults, it trains again within a bounded time, and comes to its
        end.
        """
        limits, scenario = self._scenario.deadlines, self._scenario
        recovery = (
            limits.backoff_max_s * 3
            + 2 * (limits.reserve_s + limits.prepare_s + limits.start_s)
            + limits.notice_s
            + 2 * TTL_S
            + 300.0
        )
        if FaultKind.HANG in scenario.families:
            recovery += limits.hang_idle_s  # until one is found that no peer speaks of
        self._time.run(scenario.fault_s + recovery)
        owner = self._seats.owner()
        if not self._time.over:
            require(owner is not None and owner.driver is not None, "7: nobody drives, and faults are over")
            assert owner is not None
            self._invariants[owner.name].check_calm()
        self._time.run(
            self._time.now + recovery + limits.final_upload_s + 5 * scenario.steps * scenario.step_s
        )
        require(self._time.over, "7: faults have ended, and the run does not")

    def _check_rows(self) -> None:
        """What was acknowledged to agents is in the journal."""
        if self._rules.damaged or self._scenario.settings.group_size is not None:
            return
        rows = self._rules.rows()
        for agent in self._cluster.hosts.values():
            for worker in [*agent.workers.values(), *agent.gone.values()]:
                if worker.rank == 0:
                    missing = acknowledged_rows(worker) - rows
                    require(not missing, f"records were acknowledged, and are not in the journal: {missing}")
