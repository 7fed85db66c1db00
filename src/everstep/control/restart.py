"""A restart in progress: of some replica groups, or of all workers. Also the first start, and a resize."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from everstep.control.commands import Recovered, Rung
from everstep.control.events import TimerName
from everstep.control.failures import Failure, Incident
from everstep.control.group import Group
from everstep.control.snapshots import At
from everstep.control.table import TRANSITIONS, Phase
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName

_KEPT = {
    Rung.FIRST_START: "",
    Rung.RESIZE: "the hosts in use",
    Rung.REPLACE_GROUPS: "the other groups, which never stopped",
    Rung.RESTART_IN_PLACE: "agents, templates, placement",
    Rung.REPLACE_HOSTS: "the other hosts' agents",
    Rung.SHRINK: "the remaining hosts' agents",
    Rung.WAIT: "the journal and checkpoints",
    Rung.FAIL: "the journal and checkpoints",
}


class Before(NamedTuple):
    """The groups that are restarted, as they were when that began."""

    epoch: int = 0
    furthest: int = 0
    """The highest report of any rank."""
    hosts: frozenset[HostId] = frozenset()
    slices: frozenset[SliceName] = frozenset()
    world: int = 0

    @classmethod
    def of(cls, groups: Collection[Group], epoch: int) -> Before:
        return cls(
            epoch,
            max((group.book.furthest for group in groups), default=0),
            frozenset(host for group in groups for host in group.hosts()),
            frozenset(name for group in groups for name in group.slices()),
            sum(len(group.ranks) for group in groups),
        )


class NewPlace:
    """Where the workers of a restart go; nowhere yet, or any more, without assignments."""

    def __init__(self, assignments: tuple[Assignment, ...] = ()) -> None:
        self.absent = tuple(a for a in assignments if a.nowhere)
        """Of groups that have to wait for a place, when the others start."""
        self.assignments = tuple(a for a in assignments if not a.nowhere) if self.absent else assignments
        self.hosts = frozenset(a.host for a in self.assignments)
        self.slices = frozenset(a.slice for a in self.assignments)


class Account:
    """What a restart is for and what it takes: for the line that tells of it."""

    def __init__(self, origin: Incident | None, at: float) -> None:
        self.origin = origin
        """What it is all for; later incidents are starts that failed."""
        self.rung = Rung.FIRST_START
        self.snapshot: At | None = None
        """What its workers restore from memory."""
        self.state_from = ""
        """Where they have their state from, and how old that was when training stopped."""
        self.steps_lost = 0
        self.began = self.ordered = self.spawned = self.ready = at
        self.restore_s = 0.0
        self._entered = at
        self._seconds: dict[Phase, float] = {}

    def left(self, stage: Phase, at: float) -> None:
        self._seconds[stage] = self._spent(stage) + at - self._entered
        self._entered = at

    def restores(self, what: str, since: float | None) -> None:
        """Its workers start from a state of this time; None: nobody knows when that was."""
        stopped = self.origin.cause.at if self.origin else self.began
        age = "" if since is None else f", {max(0.0, stopped - since):.1f} s old"
        self.state_from = f"{what}{age}"

    def recovered(self, at: float, epoch: int) -> Recovered:
        """Every rank has reported: what the recovery cost. The seconds add up to the time since it
        happened.
        """
        cause: Failure | None = self.origin.cause if self.origin else None
        rendezvous = self.ready - min(max(self.spawned, self.ordered), self.ready)
        restore = min(self.restore_s, at - self.ready)
        return Recovered(
            at,
            epoch=epoch,
            rung=self.rung,
            cause=cause,
            kept=_KEPT[self.rung],
            steps_lost=self.steps_lost,
            detect_s=max(0.0, self.began - cause.at) if cause else 0.0,
            stop_s=self._spent(Phase.SETTLING) + self._spent(Phase.STOPPING),
            wait_s=self._spent(Phase.BACKOFF) + self._spent(Phase.WAITING),
            place_s=self._spent(Phase.PLACING),
            start_s=self._spent(Phase.STARTING) - rendezvous,
            rendezvous_s=rendezvous,
            restore_s=restore,
            first_step_s=at - self.ready - restore,
            state_from=self.state_from,
        )

    def _spent(self, stage: Phase) -> float:
        return self._seconds.get(stage, 0.0)


class Restart:
    """Where a restart stands. What it does at each stage is the controller's."""

    def __init__(
        self, key: int, *, stage: Phase, full: bool, incident: Incident | None, reason: str, began: float
    ) -> None:
        self.key = key
        self.stage = stage
        self.full = full
        self.groups: set[int] = set()
        """The replica groups concerned; all of them for a full restart."""
        self.incident = incident
        self.reason = reason
        self.attempts = 0
        """Starts that failed so far."""
        self.awaits: set[TimerName] | None = None
        """While it settles, what is waited for before workers are ended: a cause, healthy ranks' reports."""
        self.stopping: dict[HostId, frozenset[int]] = {}
        """Ranks to be gone, by host."""
        self.waits_for_uploads = False
        self.place = NewPlace()
        self.reservation: int | None = None
        self.before = Before()
        self.account = Account(incident, began)

    @property
    def has_workers(self) -> bool:
        return self.stage in (Phase.SETTLING, Phase.STOPPING, Phase.STARTING)

    def cover(self, groups: Collection[Group], epoch: int) -> None:
        """These groups, as they are now, are what is restarted."""
        self.groups = {group.number for group in groups}
        self.before = Before.of([group for group in groups if not group.nowhere], epoch)

    def stop_waiting_for(self, what: TimerName) -> None:
        if self.awaits is not None:
            self.awaits.discard(what)

    def enter(self, stage: Phase, at: float) -> None:
        assert (self.stage, stage) in TRANSITIONS, f"{self.stage} → {stage} is not in the table"
        self.account.left(self.stage, at)
        self.stage = stage

    def find_rung(self) -> Rung:
        """Which rung of the ladder this start is, read off its result."""
        if not self.full:
            return Rung.REPLACE_GROUPS
        if self.before.world == 0:
            return Rung.FIRST_START
        if self.account.origin is None:
            return Rung.RESIZE
        if len(self.place.assignments) < self.before.world:
            return Rung.SHRINK
        return Rung.RESTART_IN_PLACE if self.place.hosts == self.before.hosts else Rung.REPLACE_HOSTS
