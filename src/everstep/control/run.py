"""The state of a run, which every part of the controller works on, and the way out for commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from everstep.backoff import Backoff
from everstep.control import commands as c
from everstep.control.budgets import Budgets
from everstep.control.events import TimerName, WorkerEvent
from everstep.control.fleet import Fleet, SliceReservation
from everstep.control.group import Group
from everstep.control.restart import Restart
from everstep.control.settings import Settings
from everstep.control.table import TRANSITIONS, Phase
from everstep.deadlines import Deadlines
from everstep.health.vitals import Finding
from everstep.health.watch import HangWatch
from everstep.identity import Incarnation
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.points import RestorePoints
from everstep.saved.reports import Settled
from everstep.saved.snapshots import Transfer, Verdict
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName


class Moving:
    """Why workers that could train on might move, and what is kept for them."""

    key = 0

    def __init__(self, settings: Settings) -> None:
        self.due: dict[TimerName, float] = {}
        self.standbys: dict[int, SliceReservation] = {}
        """Slices that are taken for workers that train. Notices that follow each other may need several."""
        self.asked = c.AskReason.NONE
        self.outdated = False
        """The workers were taken over from an earlier driver, and run other code than this one has."""
        self.grow_from = 0.0
        self.refuge_from = 0.0
        self.backoff = Backoff(settings.deadlines)

    @property
    def slices(self) -> frozenset[SliceName]:
        """Taken, or asked for."""
        return frozenset(name for standby in self.standbys.values() for name in standby.slices)


@dataclass
class HangCheck:
    """A check of the ranks of one group, and of those of the others that may wait for it."""

    key: int
    of: Incarnation
    rank: int
    """It is overdue."""
    awaited: set[HostId]
    due: dict[TimerName, float]
    found: list[Finding] = field(default_factory=list)


class HangChecks(HangWatch):
    def __init__(self, limits: Deadlines) -> None:
        super().__init__(limits)
        self.checks: dict[int, HangCheck] = {}
        """By replica group."""


@dataclass
class Ending:
    """How the run ends, from the moment that this is certain."""

    end: c.EndRun
    due: dict[TimerName, float]
    key: int = 0


Waiting = Moving | Restart | SliceReservation | HangCheck | Ending
"""What waits, and until when: its timers come and go with it."""


class Run:
    """Phase, epoch, groups, and the restarts that are under way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 0.0
        self.phase = Phase.NEW
        self.epoch = 0
        self.groups: dict[int, Group] = {}
        self.restarts: list[Restart] = []
        self.unproven: list[Restart] = []
        """Restarts that are over, and of whose workers not every one has reported since."""
        self.out: list[c.AnyCommand] = []
        """The commands of the event at hand."""
        self.budgets = Budgets(settings)
        self.saved = RestorePoints(settings.snapshot_copies)
        self.fleet = Fleet(settings)
        self.moving = Moving(settings)
        self.hangs = HangChecks(settings.deadlines)
        self.ending: Ending | None = None
        self._last_key = 0

    def do(self, command: c.AnyCommand) -> None:
        self.out.append(command)

    def next_key(self) -> int:
        """For a restart, a reservation or a hang check. Never 0, which ``moving`` and ``ending`` share: their
        timers have different names.
        """
        self._last_key += 1
        return self._last_key

    @property
    def over(self) -> bool:
        return self.phase in (Phase.ENDING, Phase.ENDED)

    def set_phase(self, phase: Phase) -> None:
        if phase is not self.phase:
            assert (self.phase, phase) in TRANSITIONS, f"{self.phase} → {phase} is not in the table"
            self.phase = phase
            self.do(c.PhaseChanged(self.now, phase.value, self.epoch))

    def ask_to_save(self, reason: c.AskReason) -> None:
        """Ask the workers for a checkpoint, for this reason; or (``NONE``) take that back."""
        if self.moving.asked is not reason:
            self.moving.asked = reason
            self.do(c.AskCheckpoint(reason))

    def waiting(self) -> Iterator[Waiting]:
        """Everything that waits for something, and must not wait for ever."""
        if self.phase is not Phase.ENDED:
            yield self.moving
            yield from self.restarts
            yield from self.fleet.asked_for.values()
            yield from self.moving.standbys.values()
            yield from self.hangs.checks.values()
            if self.ending is not None:
                yield self.ending

    # ------------------------------------------------------------------ groups

    def make_groups(self, assignments: Iterable[Assignment], generations: dict[int, int]) -> None:
        members: dict[int, list[Assignment]] = {}
        for assignment in assignments:
            members.setdefault(assignment.group_id, []).append(assignment)
        for number, found in members.items():
            generation = generations.get(number, 0)
            known = self.saved.checkpoints.highest(Incarnation(self.epoch, number, generation))
            self.groups[number] = Group(number, generation, found, known)

    def group_of(self, rank: int) -> Group | None:
        return next((group for group in self.groups.values() if rank in group.ranks), None)

    def group_for(self, event: WorkerEvent) -> Group | None:
        """The group that this event is about, if it is about its present incarnation. A group without a place
        has no workers: what comes from one is of a worker that an earlier driver gave up.
        """
        group = self.group_of(event.rank) if event.epoch == self.epoch else None
        if group is None or group.nowhere or group.generation != event.generation:
            return None
        return group

    def incarnation(self, group: Group) -> Incarnation:
        return Incarnation(self.epoch, group.number, group.generation)

    def trains(self, group: Group) -> bool:
        return self.phase is Phase.RUNNING and not group.nowhere and group.number not in self.restarting

    def commit_complete(self, group: Group, settled: Settled) -> None:
        """Commit what is complete, throw away what never will be."""
        for checkpoint in settled.ready:
            epoch, number, generation = self.incarnation(group)
            ref = CheckpointRef(checkpoint.folder, epoch, checkpoint.index, number, generation)
            ref = self.saved.checkpoints.begin(ref, checkpoint.held)
            self.do(c.CommitCheckpoint(epoch, number, generation, checkpoint, ref.order))
        for folder in settled.garbage:
            self.do(c.DiscardCheckpoint(folder))

    def uploading(self, groups: Iterable[int]) -> frozenset[HostId]:
        """The hosts whose uploads alone stand between a checkpoint of these groups and its commit."""
        found = (self.groups[number] for number in groups)
        return frozenset(group.members[rank].host for group in found for rank in group.book.uploading())

    def send_verdicts(self, verdicts: Sequence[Verdict | Transfer]) -> None:
        """To ranks and hosts: what becomes of their snapshots."""
        for one in verdicts:
            self.do(c.KeepSnapshot(self.epoch, *one) if isinstance(one, Verdict) else c.CopySnapshot(*one))

    def stop_workers(self, by: Waiting, groups: Iterable[int], grace_s: float) -> bool:
        """Tell the workers of these groups that may still run to end, once. Whether all are gone."""
        found = [self.groups[number] for number in sorted(groups)]
        for group in found:
            running = group.ranks - group.gone - group.stopping
            for host in sorted(group.hosts()) if running else ():
                if ranks := group.ranks_on(host) & running:
                    self.do(c.StopWorkers(host, self.epoch, ranks, grace_s, group.generation))
                    by.due[TimerName.KILL] = self.now + grace_s + self.settings.deadlines.kill_s
            group.stopping |= running
        return all(group.ranks <= group.gone for group in found)

    # ------------------------------------------------------------------ restarts

    @property
    def restarting(self) -> set[int]:
        """The groups that are being restarted."""
        return {g for restart in self.restarts for g in restart.groups}

    def steady(self) -> list[Group]:
        """The groups that have a place and aren't being restarted."""
        restarting = self.restarting
        return [g for g in self.groups.values() if not g.nowhere and g.number not in restarting]

    def enter_stage(self, restart: Restart, stage: Phase) -> None:
        if stage is not restart.stage:
            restart.enter(stage, self.now)
            if restart.full:
                self.set_phase(stage)

    def abandon(self, restart: Restart) -> None:
        self.withdraw(restart.reservation)
        self.restarts.remove(restart)

    def end_standbys(self) -> None:
        """Workers restart: slices that were reserved for them can be part of that, reservations that are not
        answered are withdrawn.
        """
        for reservation in self.moving.standbys:
            self.withdraw(reservation)
        self.moving.standbys.clear()

    def used_by_others(self, restart: Restart) -> set[SliceName]:
        """Slices that other groups train in, or that are kept for somebody."""
        return used_by_other_groups(self, restart.groups, restart) | self.moving.slices

    # ------------------------------------------------------------------ taking slices and giving them back

    def reserve(self, slices: Iterable[SliceName]) -> SliceReservation:
        key, wanted, fleet = self.next_key(), frozenset(slices), self.fleet
        assert not wanted & fleet.held, "what is held is not reserved again"
        hosts = frozenset(h.id for h in fleet.hosts.values() if h.slice in wanted and h.alive)
        due = {TimerName.RESERVE: self.now + self.settings.deadlines.reserve_s}
        fleet.asked_for[key] = SliceReservation(key, wanted, hosts, due)
        self.do(c.Reserve(key, tuple(sorted(wanted))))
        return fleet.asked_for[key]

    def withdraw(self, reservation: int | None) -> None:
        """Give up on a reservation that has not been answered."""
        found = self.fleet.asked_for.pop(reservation or 0, None)
        if found is not None:
            self.do(c.Release(tuple(sorted(found.slices))))

    def release(self, slices: Collection[SliceName]) -> None:
        names = tuple(sorted(self.fleet.held & set(slices)))
        if names:
            for host in self.fleet.give_back(names):
                self.saved.snapshots.host_lost(host)
            self.do(c.Release(names))


def used_by_other_groups(run: Run, groups: Collection[int], restart: Restart | None = None) -> set[SliceName]:
    """Slices that groups beside these have, or that are planned for another restart."""
    used = {name for g in run.groups.values() if g.number not in groups for name in g.slices()}
    return used.union(*(other.place.slices for other in run.restarts if other is not restart))
