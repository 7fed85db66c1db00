"""What the controller wants done.

Commands are carried out in order; each answers with an event, or needs no answer.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.control.budgets import Budget
from everstep.control.events import StopKind, TimerName
from everstep.failures import Failure
from everstep.health.vitals import Finding
from everstep.saved.reports import CompleteCheckpoint
from everstep.saved.snapshots import At
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName


class Rung(enum.StrEnum):
    """The recovery ladder, lowest first; and the two starts that recover from nothing."""

    FIRST_START = "first start"
    PLANNED = "resize"
    """For other places, or new code. Journals have always called it by this name."""
    REPLACE_GROUPS = "replace the failed replica groups"
    RESTART_IN_PLACE = "restart in place"
    REPLACE_HOSTS = "replace the lost hosts"
    SHRINK = "shrink"
    WAIT = "wait for capacity"
    FAIL = "fail"

    @property
    def is_partial(self) -> bool:
        """Whether other workers train on meanwhile."""
        return self is Rung.REPLACE_GROUPS


class Outcome(enum.StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    FENCED = "fenced"


class AskReason(enum.StrEnum):
    """Why the workers are asked for a checkpoint."""

    NONE = ""
    RESIZE = "resize"
    PREEMPTION = "preemption"
    NEW_CODE = "new code"
    STOP = "stop"


class Command(msgspec.Struct, frozen=True):
    pass


class SetTimer(Command, frozen=True):
    """``TimerFired(timer, key)`` at ``at``, in place of an earlier one of that name and key."""

    timer: TimerName
    key: int
    at: float


class CancelTimer(Command, frozen=True):
    timer: TimerName
    key: int


class Reserve(Command, frozen=True):
    """All of these slices or none: ``Reserved`` or ``ReservationFailed``."""

    reservation: int
    slices: tuple[SliceName, ...]


class Release(Command, frozen=True):
    """Give these slices back, or withdraw the reservation that asks for them.

    Whatever of ours is left on them ends.
    """

    slices: tuple[SliceName, ...]


class RequestCapacity(Command, frozen=True):
    """This many workers are wanted: whatever can bring hosts up may do so. 0 withdraws it."""

    workers: int


class PrepareHost(Command, frozen=True):
    """``HostPrepared`` or ``HostUnprepared``."""

    host: HostId


class RetireHost(Command, frozen=True):
    """The host counts as lost. If it should come back, its workers must end before it is used again."""

    host: HostId


class StartWorkers(Command, frozen=True):
    epoch: int
    generations: tuple[tuple[int, int], ...]
    """(replica group, generation) of the groups that start."""
    assignments: tuple[Assignment, ...]
    checkpoint: str | None
    """The folder to restore from."""
    reason: str
    """Why this start, in words, for ``get_context()`` and the log."""
    snapshot: At | None = None
    """What every rank restores from memory."""
    kept: tuple[At, ...] = ()
    """This one and older ones, which may still be needed."""
    sources: tuple[tuple[int, tuple[HostId, ...]], ...] = ()
    """Which hosts have it, by the ranks that took it; empty: each rank's own host."""

    @property
    def full(self) -> bool:
        """A new epoch begins with it; otherwise others train on."""
        return not any(generation for _, generation in self.generations)


class StopWorkers(Command, frozen=True):
    """End these ranks on this host, then ``WorkersGone``. Without grace they are killed at once."""

    host: HostId
    epoch: int
    ranks: frozenset[int]
    grace_s: float
    generation: int = 0
    """Of every rank in ``ranks``, and of the answer."""


class KeepSnapshot(Command, frozen=True):
    """Tell these ranks that ``kept`` stay, and that nothing else up to ``upto`` is needed; and these hosts
    that they need nothing else of ranks that aren't there.
    """

    epoch: int
    ranks: tuple[int, ...]
    kept: tuple[At, ...]
    upto: At
    hosts: tuple[HostId, ...] = ()


class CopySnapshot(Command, frozen=True):
    """Copy a rank's snapshot from one host's memory to another's: ``SnapshotCopied``."""

    rank: int
    source: HostId
    to: HostId
    snapshot: At


class ExamineWorkers(Command, frozen=True):
    """Find out where the workers of this host are: ``WorkersExamined``, with the same number."""

    host: HostId
    epoch: int
    check: int


class KeepStacks(Command, frozen=True):
    """Save under this name, in the run's folder, where every rank of a group was found."""

    name: str
    found: tuple[Finding, ...]
    culprits: tuple[int, ...]


class AskCheckpoint(Command, frozen=True):
    """Make ``should_checkpoint()`` true in every worker, or (``NONE``) false again."""

    reason: AskReason


class CommitCheckpoint(Command, frozen=True):
    """Write the manifest and the journal record: ``CheckpointCommitted`` or ``CommitFailed``.

    A folder that was discarded before fails: its agent may not know of that.
    """

    epoch: int
    group: int
    generation: int
    checkpoint: CompleteCheckpoint
    order: int = 0
    """Kept with the record, so that a later driver knows which is the newest."""


class DiscardCheckpoint(Command, frozen=True):
    """Nobody can commit this folder any more: it is garbage."""

    folder: str


class EndRun(Command, frozen=True):
    """Everything is stopped and released. The last command of a run."""

    outcome: Outcome
    cause: Failure | None
    failures: tuple[Failure, ...]
    message: str
    stop: StopKind | None = None


# Records: shown to the user, and kept in the journal.


class Record(Command, frozen=True, tag=True):
    at: float


class PhaseChanged(Record, frozen=True, tag="phase"):
    phase: str
    epoch: int
    """The present one; on ``starting`` the one that begins, so that its number is never used twice."""


class GroupsStarting(Record, frozen=True, tag="starting"):
    """These incarnations of replica groups begin, while others train; so that no number is used twice."""

    epoch: int
    generations: tuple[tuple[int, int], ...]


class Waiting(Record, frozen=True, tag="waiting"):
    """Below the minimum: what there is, and what is missing."""

    workers_min: int
    message: str


class FailureSeen(Record, frozen=True, tag="failure"):
    failure: Failure


class HangSeen(Record, frozen=True, tag="hang"):
    """A group of workers stands still, and these ranks are why."""

    epoch: int
    ranks: tuple[int, ...]
    message: str
    stacks: str
    """Where the stacks of all ranks are, in the run's folder."""
    action: str
    """``restart``, ``warn`` or ``fail``."""


class RecoveryDecided(Record, frozen=True, tag="decided"):
    """The workers concerned are gone; this is how the run goes on."""

    cause: Failure
    budget: Budget
    spent: int
    limit: int
    groups: tuple[int, ...]
    """The replica groups concerned; empty for all."""
    pause_s: float
    unsaved: int = 0
    """Steps of the groups that go on, and that a restart of all workers would lose: there is no checkpoint.
    Reported once.
    """


class GroupStarted(Record, frozen=True, tag="started"):
    """Every worker of this start is ready."""

    epoch: int
    generations: tuple[tuple[int, int], ...]
    world_size: int
    """Workers that train now, these and others; replica groups that wait for a place are not among them."""
    num_slices: int
    rung: Rung
    reason: str
    checkpoint: str | None
    from_memory: bool = False
    """Its workers restore a snapshot in place of that."""
    snapshot: At | None = None
    """The one that they restore."""


class Recovered(Record, frozen=True, tag="recovered"):
    """Every rank has reported again: what it cost, in seconds by phase."""

    epoch: int
    rung: Rung
    cause: Failure | None
    kept: str
    steps_lost: int
    detect_s: float
    stop_s: float
    wait_s: float
    """Backing off and waiting for capacity."""
    place_s: float
    start_s: float
    rendezvous_s: float
    restore_s: float
    first_step_s: float
    state_from: str = ""
    """Where the workers' state came from, and how old it was when training stopped."""

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")))


class CheckpointKept(Record, frozen=True, tag="checkpoint"):
    folder: str
    epoch: int
    index: int
    group: int = 0
    generation: int = 0


class HostSetAside(Record, frozen=True, tag="set aside"):
    host: HostId
    until: float


class PreemptionSeen(Record, frozen=True, tag="preemption"):
    slice: SliceName
    deadline: float | None
    """None: the notice was cancelled."""
    hosts: tuple[HostId, ...] = ()
    """The machines that it is about."""


TimerCommand = SetTimer | CancelTimer
HostCommand = Reserve | Release | RequestCapacity | PrepareHost | RetireHost
WorkerCommand = StartWorkers | StopWorkers | ExamineWorkers | AskCheckpoint
StateCommand = KeepSnapshot | CopySnapshot | CommitCheckpoint | DiscardCheckpoint
AnyCommand = TimerCommand | HostCommand | WorkerCommand | StateCommand | KeepStacks | EndRun | Record
