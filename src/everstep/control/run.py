"""The state of a run that all parts of the brain share, and the way out for their commands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from everstep.control import commands as c
from everstep.control.budgets import Budgets
from everstep.control.checkpoints import Checkpoints
from everstep.control.events import CheckpointRef, TimerName, WorkerEvent
from everstep.control.failures import Budget
from everstep.control.fleet import Fleet
from everstep.control.group import Group
from everstep.control.relocation import Relocation
from everstep.control.reports import Settled
from everstep.control.restart import Restart
from everstep.control.settings import Settings
from everstep.control.snapshots import At, Snapshots, Verdict
from everstep.control.table import TRANSITIONS, Phase
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName

_RESTART_TIMERS = (
    TimerName.SETTLE,
    TimerName.FINISH_REPORT,
    TimerName.KILL,
    TimerName.BACKOFF,
    TimerName.PREPARE,
    TimerName.UPLOAD,
    TimerName.START,
    TimerName.SAY_SHORTAGE,
)


class Run:
    """Phase, epoch, groups, and the restarts that are under way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.NEW
        self.epoch = 0
        self.groups: dict[int, Group] = {}
        self.restarts: list[Restart] = []
        self.out: list[c.AnyCommand] = []
        """The commands of the event at hand."""
        self.trained = False
        """Workers of this run have got to train, so that the function can be loaded."""
        self.has_reported = False
        """So that a worker that doesn't is known to be late."""
        self.budgets = Budgets(
            {
                Budget.FAILURES: settings.max_failures,
                Budget.STARTUP: settings.controller_failure_limit,
                Budget.PREEMPTION: settings.max_preemption_failures,
                Budget.REPLICAS: settings.max_replica_failures or 0,
            }
        )
        self.trains_since = 0.0
        """When all workers last began to train, from what they had restored."""
        self.checkpoints = Checkpoints()
        self.snapshots = Snapshots()
        self.fleet = Fleet(settings, self.do, self.snapshots.host_lost)
        self.relocation = Relocation(settings, self.fleet, self.do, self.next_key)
        self._group_of: dict[int, int] = {}
        self._held: set[str] = set()
        """Folders of checkpoints that are being committed, and that their ranks wait for."""
        self._last_key = 0

    def do(self, command: c.AnyCommand) -> None:
        self.out.append(command)

    def next_key(self) -> int:
        """For a restart or a reservation. Never 0, which is the run's own."""
        self._last_key += 1
        return self._last_key

    @property
    def over(self) -> bool:
        return self.phase in (Phase.ENDING, Phase.ENDED)

    def set_phase(self, phase: Phase, at: float) -> None:
        if phase is not self.phase:
            assert (self.phase, phase) in TRANSITIONS, f"{self.phase} → {phase} is not in the table"
            self.phase = phase
            self.do(c.PhaseChanged(at, phase.value, self.epoch))

    # ------------------------------------------------------------------ groups

    def make_groups(self, assignments: Sequence[Assignment], generations: dict[int, int]) -> None:
        members: dict[int, list[Assignment]] = {}
        for assignment in assignments:
            members.setdefault(assignment.group_id, []).append(assignment)
        for number, found in members.items():
            generation = generations.get(number, 0)
            known = self.checkpoints.highest(self.epoch, number, generation)
            self.groups[number] = Group(number, generation, found, known)
            self._group_of.update((a.rank, number) for a in found)

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.groups.clear()
        self._group_of.clear()

    def group_of(self, rank: int) -> Group | None:
        return self.groups.get(self._group_of.get(rank, -1))

    def current(self, event: WorkerEvent) -> Group | None:
        """The group that this event is about, if it is about its present incarnation. One without a place has
        none: who speaks for it was given up by an earlier driver.
        """
        group = self.group_of(event.rank) if event.epoch == self.epoch else None
        if group is None or group.nowhere or group.generation != event.generation:
            return None
        return group

    def settle(self, group: Group, settled: Settled) -> None:
        """Commit what is complete, throw away what never will be."""
        for checkpoint in settled.ready:
            ref = self.checkpoints.begin(
                CheckpointRef(checkpoint.folder, self.epoch, checkpoint.index, group.number, group.generation)
            )
            if checkpoint.held:
                self._held.add(ref.folder)
            self.do(c.CommitCheckpoint(self.epoch, ref.group, ref.generation, checkpoint, ref.order))
        for folder in settled.garbage:
            self.do(c.DiscardCheckpoint(folder))

    def is_held(self, folder: str) -> bool:
        """Asked once, when it has been committed: whether its ranks wait in the report that brought it."""
        held = folder in self._held
        self._held.discard(folder)
        return held

    def discard_open(self, group: Group) -> None:
        """What its dead ranks began and can't finish is garbage."""
        for folder in group.book.open_folders.values():
            self.do(c.DiscardCheckpoint(folder))

    def uploading(self, group: Group) -> frozenset[HostId]:
        """The hosts whose uploads alone stand between a checkpoint of this group and its commit."""
        return frozenset(group.members[rank].host for rank in group.book.uploading())

    def pass_on(self, verdicts: Sequence[Verdict]) -> None:
        """Tell ranks what becomes of their snapshots."""
        for ranks, kept, upto in verdicts:
            self.do(c.KeepSnapshot(self.epoch, ranks, kept, upto))

    def restorable(self, restart: Restart) -> At | None:
        """What every worker of this start restores from memory: nothing, if storage has a newer state.
        Replica groups have none: a group that is replaced takes its state from the others.
        """
        if self.settings.group_size is not None:
            return None
        kept = self.snapshots.begin({a.rank: a.host for a in restart.place.assignments})
        if kept is not None and self.checkpoints.holds_newer(kept):
            self.snapshots.forget()
            return None
        return kept

    # ------------------------------------------------------------------ restarts

    def each_restart(self) -> Iterator[Restart]:
        """Those that are under way, without what is abandoned because of what happens to one before."""
        for restart in list(self.restarts):
            if restart in self.restarts:
                yield restart

    @property
    def restarting(self) -> set[int]:
        """The groups that are being restarted."""
        return {g for restart in self.restarts for g in restart.groups}

    @property
    def taken(self) -> set[SliceName]:
        """The slices that they will start in."""
        return {name for restart in self.restarts for name in restart.place.slices}

    def stage(self, restart: Restart, stage: Phase, at: float) -> None:
        if stage is not restart.stage:
            restart.enter(stage, at)
            if restart.full:
                self.set_phase(stage, at)

    def withdraw(self, restart: Restart) -> None:
        """Give back what this restart has asked for and not got."""
        self.fleet.withdraw(restart.reservation)
        restart.reservation = None

    def cancel_timers(self, restart: Restart, but: TimerName | None = None) -> None:
        for timer in _RESTART_TIMERS:
            if timer is not but:
                self.do(c.CancelTimer(timer, restart.key))

    def abandon(self, restart: Restart) -> None:
        self.cancel_timers(restart)
        self.withdraw(restart)
        self.restarts.remove(restart)

    def worth_of_uploads(self, restart: Restart) -> float:
        """How long it takes to train again what is being uploaded and nothing else holds: so long, at most,
        is it worth to wait for it. Without anything else to restore, it is worth any wait.
        """
        newest, snapshots = self.checkpoints.newest, self.snapshots
        if newest is None and snapshots.kept is None:
            return math.inf
        uploading = [
            self.checkpoints.reported_at((self.epoch, g.number, g.generation), index) or 0.0
            for g in (self.groups[number] for number in restart.groups)
            for index in g.book.lacking_uploads()
        ]
        saved = self.checkpoints.since(newest) if newest is not None else None
        otherwise = max(self.trains_since, saved or 0.0, snapshots.since or 0.0)
        return max(0.0, max(uploading, default=0.0) - otherwise)

    def uploading_hosts(self, restart: Restart) -> frozenset[HostId]:
        return frozenset(host for g in restart.groups for host in self.uploading(self.groups[g]))

    def placed_groups(self) -> int:
        """How many replica groups have a place, or are about to get one."""
        waiting = {g for restart in self.restarts if restart.stage is Phase.WAITING for g in restart.groups}
        return len(self.groups.keys() - waiting)

    def used_by_others(self, restart: Restart) -> set[SliceName]:
        """Slices that other groups train in, or that are kept for somebody."""
        used = {name for g in self.groups.values() if g.number not in restart.groups for name in g.slices()}
        used |= {name for other in self.restarts if other is not restart for name in other.place.slices}
        return used | self.relocation.standbys.slices

    # ------------------------------------------------------------------ what is always true

    def assert_invariants(self) -> None:
        if not self.restarts:
            return
        full = [restart for restart in self.restarts if restart.full]
        if full:
            assert len(self.restarts) == 1, "a full restart stands alone"
            assert full[0].stage is self.phase, "a full restart and the run are in one phase"
        if len(self.restarts) > 1:
            covered = [g for restart in self.restarts for g in restart.groups]
            assert len(covered) == len(set(covered)), "a group is in two restarts"
