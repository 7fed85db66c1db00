"""A restart in progress: of some replica groups, or of all workers. Also the first start, and a resize."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.control.commands import Recovered, Rung
from everstep.control.events import TimerName
from everstep.control.group import Group
from everstep.control.table import TRANSITIONS, Phase
from everstep.failures import Failure, Incident
from everstep.saved.snapshots import At
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName

_KEPT = {
    Rung.FIRST_START: "",
    Rung.PLANNED: "the hosts in use",
    Rung.REPLACE_GROUPS: "the other groups, which never stopped",
    Rung.RESTART_IN_PLACE: "agents, templates, placement",
    Rung.REPLACE_HOSTS: "the other hosts' agents",
    Rung.SHRINK: "the remaining hosts' agents",
}


class Before(NamedTuple):
    """The groups that are restarted, as they were when that began."""

    epoch: int = 0
    furthest: int = 0
    """The highest report of any rank."""
    hosts: frozenset[HostId] = frozenset()
    slices: frozenset[SliceName] = frozenset()
    world: int = 0


class NewPlace:
    """The step of the recovery ladder that was chosen, and where its workers go. Without assignments there is
    no place: none has been found yet, or it has failed.
    """

    def __init__(self, rung: Rung = Rung.WAIT, assignments: tuple[Assignment, ...] = ()) -> None:
        self.rung = rung
        self.absent = tuple(a for a in assignments if a.nowhere)
        """Of groups that have to wait for a place, when the others start."""
        self.assignments = tuple(a for a in assignments if not a.nowhere)
        self.hosts = frozenset(a.host for a in self.assignments)
        self.slices = frozenset(a.slice for a in self.assignments)


class Account:
    """What a restart is for and what it takes: for ``Recovered``."""

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
        self._spent: defaultdict[Phase, float] = defaultdict(float)

    def left(self, stage: Phase, at: float) -> None:
        self._spent[stage] += at - self._entered
        self._entered = at

    def restores(self, what: str, since: float | None) -> None:
        """Its workers start from a state that was reported at ``since``; None: that isn't known."""
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
            stop_s=self._spent[Phase.SETTLING] + self._spent[Phase.STOPPING],
            wait_s=self._spent[Phase.BACKOFF] + self._spent[Phase.WAITING],
            place_s=self._spent[Phase.PLACING],
            start_s=self._spent[Phase.STARTING] - rendezvous,
            rendezvous_s=rendezvous,
            restore_s=restore,
            first_step_s=at - self.ready - restore,
            state_from=self.state_from,
        )


@dataclass(eq=False)
class Restart:
    """Where a restart stands. ``recovery.advance`` moves it on."""

    key: int
    stage: Phase
    full: bool
    incident: Incident | None
    reason: str
    account: Account
    groups: set[int] = field(default_factory=set)
    """The replica groups concerned; all of them for a full restart."""
    attempts: int = 0
    """Starts that failed so far."""
    settles: bool = False
    """Its workers are not ended yet: a cause, or healthy ranks' reports, are waited for."""
    due: dict[TimerName, float] = field(default_factory=dict)
    """What it waits for, and until when."""
    place: NewPlace = field(default_factory=NewPlace)
    reservation: int | None = None
    before: Before = field(default_factory=Before)

    @property
    def is_ending(self) -> bool:
        return self.stage in (Phase.SETTLING, Phase.STOPPING)

    @property
    def waits_for_uploads(self) -> bool:
        return TimerName.UPLOAD in self.due

    def cover(self, groups: Collection[Group], epoch: int) -> None:
        """These groups, as they are now, are what is restarted."""
        self.groups = {group.number for group in groups}
        placed = [group for group in groups if not group.nowhere]
        self.before = Before(
            epoch,
            max((group.book.furthest for group in placed), default=0),
            frozenset(host for group in placed for host in group.hosts()),
            frozenset(name for group in placed for name in group.slices()),
            sum(len(group.ranks) for group in placed),
        )

    def stop_waiting(self) -> None:
        """Only uploads are waited for across stages."""
        self.due = {timer: at for timer, at in self.due.items() if timer is TimerName.UPLOAD}

    def enter(self, stage: Phase, at: float) -> None:
        assert (self.stage, stage) in TRANSITIONS, f"{self.stage} → {stage} is not in the table"
        self.account.left(self.stage, at)
        self.stage = stage
        self.stop_waiting()

    def choose(self, assignments: tuple[Assignment, ...]) -> None:
        """The lowest step of the ladder that these places allow is taken."""
        self.place = NewPlace(self._rung(assignments), assignments)

    def _rung(self, assignments: tuple[Assignment, ...]) -> Rung:
        placed = [a for a in assignments if not a.nowhere]
        if not placed:
            return Rung.WAIT
        if not self.full:
            return Rung.REPLACE_GROUPS
        if self.before.world == 0:
            return Rung.FIRST_START
        if self.account.origin is None:
            return Rung.PLANNED
        if len(placed) < self.before.world:
            return Rung.SHRINK
        in_place = {a.host for a in placed} == self.before.hosts
        return Rung.RESTART_IN_PLACE if in_place else Rung.REPLACE_HOSTS
