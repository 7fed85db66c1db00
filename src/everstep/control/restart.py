"""A restart in progress: of some replica groups, or of all workers. Also the first start, and a resize."""

from __future__ import annotations

from collections.abc import Collection

from everstep.control.commands import Recovered, Rung
from everstep.control.events import TimerName
from everstep.control.failures import Failure, Incident
from everstep.control.group import Group
from everstep.control.placement import Assignment
from everstep.control.snapshots import At
from everstep.control.table import TRANSITIONS, Phase
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
        self.origin = incident
        """What it is all for; later incidents are starts that failed."""
        self.reason = reason
        self.rung = Rung.FIRST_START
        self.attempts = 0
        """Starts that failed so far."""
        self.awaits: set[TimerName] = set()
        """What is waited for before workers are ended: the cause, reports of healthy ranks."""
        self.stopping: dict[HostId, frozenset[int]] = {}
        """Ranks to be gone, by host."""
        self.waits_for_uploads = False
        self.assign(())
        self.reservation: int | None = None
        # For the line that tells what a recovery cost.
        self.began = began
        self.ordered = began
        self.spawned = began
        self.ready = began
        self.restore_s = 0.0
        self.steps_lost = 0
        self.snapshot: At | None = None
        """What its workers restore from memory."""
        self.state_from = ""
        """Where they have their state from, and how old that was when training stopped."""
        self._entered = began
        self._seconds: dict[Phase, float] = {}
        self.old_epoch = 0
        self.old_furthest = 0
        self.old_hosts: frozenset[HostId] = frozenset()
        self.old_slices: frozenset[SliceName] = frozenset()
        self.old_world = 0

    def assign(self, assignments: tuple[Assignment, ...]) -> None:
        """Where its workers go; nowhere yet, or any more, if empty."""
        self.absent = tuple(a for a in assignments if a.nowhere)
        """Of groups that have to wait for a place, when the others start."""
        self.assignments = tuple(a for a in assignments if not a.nowhere) if self.absent else assignments
        self.hosts = frozenset(a.host for a in self.assignments)
        self.slices = frozenset(a.slice for a in self.assignments)

    @property
    def has_workers(self) -> bool:
        return self.stage in (Phase.SETTLING, Phase.STOPPING, Phase.STARTING)

    def cover(self, groups: Collection[Group], epoch: int) -> None:
        """These groups, as they are now, are what is restarted."""
        self.groups = {group.number for group in groups}
        groups = [group for group in groups if not group.nowhere]
        self.old_epoch = epoch
        self.old_furthest = max((group.book.furthest for group in groups), default=0)
        self.old_slices = frozenset(name for group in groups for name in group.slices())
        self.old_hosts = frozenset(host for group in groups for host in group.hosts())
        self.old_world = sum(len(group.ranks) for group in groups)

    def enter(self, stage: Phase, at: float) -> None:
        assert (self.stage, stage) in TRANSITIONS, f"{self.stage} → {stage} is not in the table"
        self._seconds[self.stage] = self._seconds.get(self.stage, 0.0) + at - self._entered
        self._entered = at
        self.stage = stage

    def find_rung(self) -> Rung:
        """Which rung of the ladder this start is, read off its result."""
        if not self.full:
            return Rung.REPLACE_GROUPS
        if self.old_world == 0:
            return Rung.FIRST_START
        if self.origin is None:
            return Rung.RESIZE
        if len(self.assignments) < self.old_world:
            return Rung.SHRINK
        return Rung.RESTART_IN_PLACE if self.hosts == self.old_hosts else Rung.REPLACE_HOSTS

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

    def restores(self, what: str, since: float | None) -> None:
        """Its workers start from a state of this time; None: nobody knows when that was."""
        stopped = self.origin.cause.at if self.origin else self.began
        age = "" if since is None else f", {max(0.0, stopped - since):.1f} s old"
        self.state_from = f"{what}{age}"

    def _spent(self, stage: Phase) -> float:
        return self._seconds.get(stage, 0.0)
