"""What must always hold, checked after every event, and at the end. The numbers are those of design.md."""

from __future__ import annotations

from collections import Counter, deque

from everstep.control import commands as c, events as e
from everstep.control.commands import Outcome, Rung
from everstep.control.failures import BUDGET_OF, Budget, Kind
from everstep.control.table import TRANSITIONS, Phase
from everstep.sim.brain.drivers import Drivers
from everstep.sim.brain.machines import Host
from everstep.sim.brain.scenario import Family, Scenario
from everstep.sim.brain.told import Told
from everstep.sim.brain.violation import Violation
from everstep.sim.brain.world import World
from everstep.topology.placement import Assignment
from everstep.topology.slices import natural_key

_MAY_SPEND = {
    Budget.FAILURES: {
        Family.CRASH,
        Family.TEMPLATE,
        Family.LOSS,
        Family.FREEZE,
        Family.STUCK,
        Family.FLAP,
        Family.NOTICE,
        Family.RACK,
        Family.STORAGE,
        Family.HANG,
    },
    Budget.PREEMPTION: {Family.PREEMPT, Family.NOTICE},
    # A start fails by itself, or because something dies during it.
    Budget.STARTUP: set(Family) - {Family.DUPLICATE, Family.STOP, Family.DRIVER, Family.CLOCK},
}


class Invariants:
    def __init__(self, scenario: Scenario, world: World) -> None:
        self.scenario = scenario
        self.world = world
        world.processes.watch = self.spawned
        self.transitions: Counter[tuple[Phase, Phase]] = Counter()
        self.rungs: Counter[Rung] = Counter()
        self.spent: Counter[Budget] = Counter()
        self.drivers: Drivers | None = None
        self._places: dict[int, Assignment] = {}
        self._epoch = 0
        self._begun_anew = 0
        """The last attempt that did not begin with a snapshot: those before it have led nowhere."""
        self._starts: deque[float] = deque()
        self._reserves: deque[float] = deque()
        self._news: deque[float] = deque()
        self._reasons: deque[float] = deque()
        """What a start need not wait after: a new checkpoint, a slice that is taken away."""
        self._phase = Phase.NEW
        self._told = Told(scenario)
        self._decided_at: float | None = None
        """The last recovery from something that failed, if nothing was learnt since."""
        self._failed_starts: Counter[int] = Counter()
        """Of a replica group's replacement, in a row."""

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    # ------------------------------------------------------------------ after every event

    def after(self, event: e.AnyEvent, commands: list[c.AnyCommand]) -> None:
        assert self.drivers is not None
        now = self.world.clock.now
        if isinstance(event, e.RunOpened):
            self._phase = Phase.NEW
            self._decided_at = None
            self._failed_starts.clear()
            if event.adopted is not None:
                self._places = {a.rank: a for a in event.adopted.assignments}
        self._told.hear(event)
        if isinstance(event, e.CapacityChanged):
            self._news.append(now)
            self._told.check_waiting(self.drivers.brain)
        for command in commands:
            if isinstance(command, c.CancelTimer | c.SetTimer):
                continue
            self._told.check(command)
            match command:
                case c.StartWorkers():
                    self._check_start(command, now)
                case c.Reserve():
                    self._reserves.append(now)
                    self._check_pace(now)
                case c.CommitCheckpoint():
                    self._check_commit(command)
                case c.DiscardCheckpoint():
                    self._check_discard(command)
                case c.PhaseChanged():
                    self._check_phase(Phase(command.phase))
                case c.KeepSnapshot():
                    if command.kept == command.upto:  # something was learnt, and kept
                        self._reasons.append(now)
                        self._decided_at = None
                case c.CheckpointKept():
                    self._reasons.append(now)
                    self._decided_at = None
                case c.HangSeen():
                    self._check_hang(command)
                case c.RecoveryDecided():
                    self._check_charge(command)
                    self._check_pause(command, now)
                    self._check_rung(command)
                case c.GroupStarted():
                    self.rungs[command.rung] += 1
                    for group, _ in command.generations:
                        self._failed_starts.pop(group, None)
                case c.Waiting():
                    self.rungs[Rung.WAIT] += 1
                case c.Recovered():
                    self._check_recovered(command)
                case c.EndRun():
                    self._check_end(command)
                case _:
                    pass
        self._check_nothing_is_leaked()
        self._check_snapshot()

    def _check_snapshot(self) -> None:
        """11: what the brain counts on is in memory at every rank, also while others are written."""
        assert self.drivers is not None
        snapshots = self.drivers.brain.run.snapshots
        if snapshots.kept is None:
            return
        for rank, host in snapshots.places.items():
            there = self.world.hosts[host]
            held = self.world.memory.find(host, rank, snapshots.kept)
            self._require(
                held is not None or not there.alive or not there.agent,
                f"11: {snapshots.kept} is kept, and rank {rank} on {host} has written over it",
            )

    def _check_phase(self, phase: Phase) -> None:
        self._require((self._phase, phase) in TRANSITIONS, f"{self._phase} → {phase} is not in the table")
        self.transitions[(self._phase, phase)] += 1
        self._phase = phase
        if phase in (Phase.PLACING, Phase.WAITING):
            assert self.drivers is not None
            self._told.check_size(self.drivers.brain)

    def _check_start(self, command: c.StartWorkers, now: float) -> None:
        """1, 5 and 9."""
        full = command.epoch != self._epoch
        places = command.assignments
        self._starts.append(now)
        self._check_pace(now)
        newest = self.world.storage.restorable()
        whole = self.world.memory.newest_whole(places) if full else None
        if whole is not None and whole.epoch < self._begun_anew:
            whole = None
        # What storage has, or has had, needs no snapshot: it is let go for a newer state, and at a resize.
        ever = max(((ref.epoch, ref.index) for ref in self.world.storage.committed), default=None)
        self._require(
            whole is None
            or (ever is not None and ever >= whole)
            or (command.snapshot is not None and command.snapshot >= whole),
            f"11: every rank has {whole} in memory, and restores {command.snapshot}",
        )
        saved = max(((ref.epoch, ref.index) for ref in newest), default=None)
        self._require(
            command.snapshot is None or saved is None or saved <= command.snapshot,
            f"11: {saved} is committed, and {command.snapshot} is restored from memory",
        )
        if command.checkpoint is None:
            self._require(not newest, "5: a checkpoint is committed, and the workers get none")
        else:
            self._require(
                any(ref.folder == command.checkpoint for ref in newest),
                "5: what is restored is not committed",
            )
            mine = self.world.storage.steps_of[command.checkpoint]
            best = max(self.world.storage.steps_of[ref.folder] for ref in newest)
            self._require(
                mine >= best - self._slack(), f"5: what is restored is not the newest: {mine} < {best}"
            )
        if full:
            self._require(command.epoch > self._epoch, "epochs grow")
            self._require(all(g == 0 for _, g in command.generations), "an epoch begins with generation 0")
            self._epoch = command.epoch
            if command.snapshot is None:
                self._begun_anew = command.epoch
            self._places = {}
            self._failed_starts.clear()
            self._check_ranks(places)
        else:
            for a in places:
                before = self._places.get(a.rank)
                if before is None:  # there was no place for it until now
                    known = next(iter(self._places.values()))
                    self._require(a.world_size == known.world_size, "9: every worker agrees on N")
                    continue
                same = (
                    a.rank,
                    a.world_size,
                    a.group_id,
                    a.group_rank,
                    a.num_slices,
                    a.slice_id,
                    a.num_groups,
                )
                was = (
                    before.rank,
                    before.world_size,
                    before.group_id,
                    before.group_rank,
                    before.num_slices,
                    before.slice_id,
                    before.num_groups,
                )
                self._require(same == was, "9: ranks and group ids stay when a group is replaced")
        self._places.update((a.rank, a) for a in places)
        assert self.drivers is not None
        replaced = {g for restart in self.drivers.brain.run.restarts for g in restart.groups}
        self._require(full or bool(self.drivers.brain.groups.keys() - replaced), "nobody trains: all restart")
        groups_alive = self.drivers.brain.groups.values()
        if not any(group.finished for group in groups_alive) and len(self.drivers.brain.run.restarts) == 1:
            self._check_whole_slices()

    def _slack(self) -> float:
        """Replica groups are a little apart: by uploads, commits, and a step with each replacement."""
        assert self.drivers is not None
        if self.scenario.settings.group_size is None:
            return 0.0
        apart = 60.0 / self.scenario.step_s + 2 * self.scenario.checkpoint_every
        return apart + len(self.drivers.started)

    def _check_ranks(self, places: tuple[Assignment, ...]) -> None:
        settings = self.scenario.settings
        n = len(places)
        # Replica groups that have no place yet count as well.
        wanted = n if settings.group_size is None else settings.workers_max
        self._require([a.rank for a in places] == list(range(n)), "9: ranks are dense")
        self._require({a.world_size for a in places} == {wanted}, "9: every worker agrees on N")
        self._require(
            settings.workers_min <= n <= settings.workers_max, "the size is what the user asked for"
        )
        num_slices = len({a.slice for a in places})
        self._require(len({a.num_slices for a in places}) == 1, "9: every worker agrees on S")
        self._require(places[0].num_slices == num_slices or n < wanted, "9: S is the number of slices")
        self._require({a.slice_id for a in places} == set(range(num_slices)), "9: slice ids are dense")
        index = {h.id: h.index for h in self.world.hosts.values()}
        order = [(natural_key(a.slice), index[a.host], a.local_rank) for a in places]
        self._require(order == sorted(order), "9: ranks are in topology order")
        self._require(
            all(a.local_world_size == sum(b.host == a.host for b in places) for a in places),
            "9: every worker agrees on its host's number of workers",
        )

    def _check_whole_slices(self) -> None:
        """1."""
        used: dict[str, Counter[str]] = {}
        for a in self._places.values():
            used.setdefault(a.slice, Counter())[a.host] += 1
        for name, hosts in used.items():
            if self.scenario.hosts_per_slice > 1:
                self._require(
                    len(hosts) == self.scenario.hosts_per_slice
                    and set(hosts.values()) == {self.scenario.slots},
                    f"1: {name} is partly used",
                )

    def _check_commit(self, command: c.CommitCheckpoint) -> None:
        """4, 5: what is committed is whole, and was never thrown away."""
        ready = command.checkpoint
        brought = {rank for rank, _ in ready.parts}
        self._require(
            brought == self.world.storage.shards[ready.folder],
            f"{ready.folder} is committed before its shards",
        )
        self._require(
            all(ref.folder != ready.folder for ref in self.world.storage.committed),
            f"{ready.folder} is committed twice",
        )

    def _check_discard(self, command: c.DiscardCheckpoint) -> None:
        self._require(
            all(ref.folder != command.folder for ref in self.world.storage.committed),
            f"4: {command.folder} is committed, and discarded",
        )

    def _check_hang(self, command: c.HangSeen) -> None:
        """Who is named hangs, and not one that waits for it, or that is at work."""
        named = {(command.epoch, rank) for rank in command.ranks}
        self._require(named <= self.world.hung, f"ranks {command.ranks} are named, and don't hang")

    def _check_charge(self, command: c.RecoveryDecided) -> None:
        """6."""
        budget = Budget(command.budget)
        self.spent[budget] += 1
        own = budget
        if budget is Budget.REPLICAS:
            own = Budget.FAILURES
            self._require(
                bool(command.groups), "6: what replacing groups may cost is spent by a full restart"
            )
        self._require(BUDGET_OF[command.cause.kind] is own, "6: a budget is spent by its own cause")
        self._require(command.spent == self.spent[budget], "6: one incident spends one")
        self._require(
            command.limit == -1 or command.spent <= command.limit, "6: no more is spent than there is"
        )
        self._require(
            self._may_spend(budget),
            f"6: {command.cause.kind} spends {budget}, and nothing of the kind happened",
        )
        self._require(
            self.spent.total() <= self.world.charges,
            f"6: {self.world.charges} things went wrong, and {self.spent.total()} recoveries are spent",
        )

    def _may_spend(self, budget: Budget) -> bool:
        """Something happened that costs this; a loss of which nobody could hear before it came is one."""
        cause = Budget.FAILURES if budget is Budget.REPLICAS else budget
        unheard = cause is Budget.FAILURES and self.world.unheard
        return unheard or bool(_MAY_SPEND[cause] & self.scenario.families)

    def _check_pause(self, command: c.RecoveryDecided, now: float) -> None:
        """Nothing retries without backoff; a slice that is taken away says nothing about the next one."""
        if command.cause.kind is Kind.PREEMPTED:
            self._reasons.append(now)
            return
        last, self._decided_at = self._decided_at, now
        again = last is not None and now - last < self.scenario.deadlines.healthy_s
        self._require(not again or command.pause_s > 0, "a recovery follows another without a pause")

    def _check_rung(self, command: c.RecoveryDecided) -> None:
        """The same failed rung isn't tried forever."""
        failed_again = command.cause.kind in (Kind.START, Kind.RESERVATION)
        for group in command.groups:
            self._failed_starts[group] = self._failed_starts[group] + 1 if failed_again else 0
            self._require(
                self._failed_starts[group] < self.scenario.settings.group_attempts,
                f"group {group} is replaced again and again, and that fails",
            )

    def _check_recovered(self, command: c.Recovered) -> None:
        seconds = [
            command.detect_s,
            command.stop_s,
            command.wait_s,
            command.place_s,
            command.start_s,
            command.rendezvous_s,
            command.restore_s,
            command.first_step_s,
        ]
        self._require(all(s >= -1e-6 for s in seconds), f"no phase takes negative time: {command}")
        self._require(command.steps_lost >= 0, "steps lost are not negative")

    def _check_end(self, command: c.EndRun) -> None:
        """6: a run ends for a reason that the user can be told."""
        assert self.drivers is not None
        if command.outcome is Outcome.FAILED:
            self.rungs[Rung.FAIL] += 1
            assert command.cause is not None
            budget = BUDGET_OF[command.cause.kind]
            if budget is None:
                self._require(self.scenario.unloadable, "6: what can be retried is retried")
                return
            budgets = self.drivers.brain.budgets
            limit = budgets.limits[budget]
            self._require(
                limit != -1 and budgets.spent[budget] >= limit, f"6: the run ends with {budget} left"
            )
            self._require(self._may_spend(budget), f"6: {budget} is spent by another's cause")
        if command.outcome is Outcome.STOPPED:
            self._require(Family.STOP in self.scenario.families, "only the user stops a run")

    def _check_pace(self, now: float) -> None:
        """Nothing retries without backoff."""
        window = 60.0
        for seen in (self._starts, self._reserves, self._news, self._reasons):
            while seen and seen[0] < now - window:
                seen.popleft()
        resizes = window / self.scenario.settings.resize_interval_s + 1
        calm = window / self.scenario.deadlines.healthy_s + 1
        allowed = 8 * calm + resizes + 2 * len(self._reasons)
        self._require(len(self._starts) <= allowed, f"{len(self._starts)} starts within a minute")
        self._require(
            len(self._reserves) <= 2 * allowed + len(self._news),
            f"{len(self._reserves)} reservations within a minute",
        )

    def spawned(self, host: Host) -> None:
        """2, whenever a process begins."""
        running = [w for w in host.workers if w.running]
        self._require(len({w.epoch for w in running}) <= 1, f"2: two epochs on {host.id}")
        self._require(len({w.rank for w in running}) == len(running), f"2: two generations on {host.id}")
        self._require(len(running) <= host.slots, f"{host.id} is overbooked")

    def _check_nothing_is_leaked(self) -> None:
        """3: what is held for us, the brain has asked for and not given back."""
        if self._phase is Phase.NEW or self.world.ours <= self._told.taken.keys():
            return
        leaked = sorted(self.world.ours - self._told.taken.keys())
        raise Violation(f"3: {', '.join(leaked)} held, and nobody knows")

    # ------------------------------------------------------------------ at the end

    def no_strangers(self) -> None:
        """3: once faults are over, every process belongs to the present incarnation of its group."""
        assert self.drivers is not None
        brain = self.drivers.brain
        groups = {(brain.epoch, g.number, g.generation) for g in brain.groups.values()}
        for host in self.world.hosts.values():
            if host.alive:
                strange = [w.rank for w in host.workers if w.running and w.key not in groups]
                self._require(not strange, f"3: old workers are left on {host.id}: ranks {strange}")

    def at_rest(self) -> None:
        """3, once the run has ended and everything had time to go."""
        for s in self.world.slices.values():
            self._require(s.holder in (None, "other"), f"3: {s.name} is left reserved")
        for host in self.world.hosts.values():
            if host.alive:
                self._require(not host.agent, f"3: an agent is left on {host.id}")
                self._require(not any(w.running for w in host.workers), f"3: workers are left on {host.id}")
        self._require(
            not any(r.waiting for r in self.world.reservations.values()), "3: a reservation is left"
        )
        committed = {ref.folder for ref in self.world.storage.committed}
        self._require(
            not committed & self.world.storage.discarded, "4: a committed checkpoint was thrown away"
        )
