"""The events that the controller handles. ``at``: when it was seen, in seconds of one monotonic clock.

Events about workers carry (epoch, generation); the controller refuses stale ones. Events from a host's agent
come in the order in which they happened there: everything a worker sent comes before ``WorkersGone``.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.control.budgets import Budget
from everstep.failures import Failure
from everstep.health.vitals import Finding, Vitals
from everstep.saved.checkpoints import CheckpointRef
from everstep.saved.reports import Part
from everstep.saved.snapshots import At, Copy
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, HostView, SliceName


class StopKind(enum.StrEnum):
    INTERRUPT = "interrupted"
    TERMINATE = "terminated"
    USER = "stopped"


class Notice(msgspec.Struct, frozen=True):
    """These machines of a slice will be taken away: what the journal keeps of a preemption notice."""

    slice: SliceName
    deadline: float
    hosts: tuple[HostId, ...]


class Adopted(msgspec.Struct, frozen=True):
    """Workers of an earlier driver that are alive and whole, as their agents report them.

    Agents then repeat what the earlier driver didn't acknowledge. The first ``Reported`` of a rank lists
    every part of which it doesn't know the outcome; a rank that has returned reports that next. Preemption
    notices that stand are repeated, too.
    """

    epoch: int
    assignments: tuple[Assignment, ...]
    generations: tuple[tuple[int, int], ...]
    """(replica group, generation)."""
    outdated: bool = False
    """They run other code, or another config, than this driver has."""
    copies: tuple[Copy, ...] = ()
    """Snapshots of them that their hosts have in memory."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at: float


class Remains(msgspec.Struct, frozen=True):
    """What an earlier driver's hosts still have, of workers that can't go on and have been ended."""

    slices: tuple[SliceName, ...]
    """These are held for the run."""
    copies: tuple[Copy, ...]
    """Snapshots of those workers."""


class RunOpened(Event, frozen=True, kw_only=True):
    """The journal has been read (or is empty) and this driver owns the run.

    ``CapacityChanged`` comes before it.
    """

    last_epoch: int = 0
    """The highest that was ever begun (``PhaseChanged.epoch``), whether or not its workers got to train."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """In the order in which they were committed."""
    let_go: tuple[CheckpointRef, ...] = ()
    """The newest deleted checkpoint of each incarnation of a group. Agents may report it again, and that
    changes nothing.
    """
    spent: tuple[tuple[Budget, int], ...] = ()
    notices: tuple[Notice, ...] = ()
    """Those that an earlier driver received, by this driver's clock: a machine may be gone before it can send
    its notice again.
    """
    adopted: Adopted | None = None
    remains: Remains | None = None


class LeaseLost(Event, frozen=True, kw_only=True):
    holder: str


class StorageLost(Event, frozen=True, kw_only=True):
    """Storage doesn't answer, while the run is being stopped."""


class StopRequested(Event, frozen=True, kw_only=True):
    kind: StopKind
    now: bool = False
    """Without the grace that workers otherwise get."""


class StopAtCheckpointRequested(Event, frozen=True, kw_only=True):
    """The run ends at its next checkpoint, for which the workers are asked, or when it has taken too long."""


class CapacityChanged(Event, frozen=True, kw_only=True):
    """All hosts that the engine knows. One that we use and that isn't listed, or isn't alive, is lost."""

    hosts: tuple[HostView, ...]


class Reserved(Event, frozen=True, kw_only=True):
    reservation: int


class ReservationFailed(Event, frozen=True, kw_only=True):
    """Nothing of it is held any more."""

    reservation: int
    reason: str


class HostPrepared(Event, frozen=True, kw_only=True):
    """The agent is there and its template has loaded the training function."""

    host: HostId


class HostUnprepared(Event, frozen=True, kw_only=True):
    """Preparing failed, or the template died; the agent lives. This comes before the events of workers that
    died with the template.
    """

    host: HostId
    failure: Failure


class HostLost(Event, frozen=True, kw_only=True):
    host: HostId
    failure: Failure
    """``HOST_LOST`` when the connection broke, ``HOST_SILENT`` when heartbeats stopped."""


class PreemptionNotice(Event, frozen=True, kw_only=True):
    host: HostId
    deadline: float


class NoticeCancelled(Event, frozen=True, kw_only=True):
    host: HostId


class WorkerEvent(Event, frozen=True, kw_only=True):
    epoch: int
    generation: int
    rank: int


class WorkerSpawned(WorkerEvent, frozen=True, kw_only=True):
    """The process runs."""

    pid: int


class WorkerReady(WorkerEvent, frozen=True, kw_only=True):
    """It has joined its group; the training function starts."""


class WorkerFailed(WorkerEvent, frozen=True, kw_only=True):
    failure: Failure


class WorkerReturned(WorkerEvent, frozen=True, kw_only=True):
    """The training function returned."""


class Reported(WorkerEvent, frozen=True, kw_only=True):
    """One or more reports of a rank, merged: it has reported up to ``upto``."""

    upto: int
    owed: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    restore_s: float = 0.0
    """On the first report: how long this worker took to load its checkpoint."""
    taken: tuple[int, ...] = ()
    """Reports of which its host has a snapshot of this rank in memory."""
    taking: tuple[int, ...] = ()
    """Reports of which one is being taken. A later event says that it has been."""


class UploadFailed(WorkerEvent, frozen=True, kw_only=True):
    index: int
    reason: str


class WorkersGone(Event, frozen=True, kw_only=True):
    """The processes of these ranks on this host have ended, and all that they sent has been passed on.

    Parts that their agent is still uploading may come later.
    """

    host: HostId
    epoch: int
    generation: int = 0
    ranks: frozenset[int]


class WorkersQuiet(Event, frozen=True, kw_only=True):
    """Workers of this host have made no progress for a while. Repeated as long as that is so."""

    host: HostId
    epoch: int
    vitals: tuple[Vitals, ...]


class WorkersExamined(Event, frozen=True, kw_only=True):
    """Answers ``ExamineWorkers``: all workers of this host."""

    host: HostId
    epoch: int
    check: int
    found: tuple[Finding, ...]


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    folder: str
    state: bool = False
    """It holds the training state, as snapshots do."""


class SnapshotDamaged(Event, frozen=True, kw_only=True):
    """The snapshot that workers were to restore from memory is not there, or not what was put there."""

    snapshot: At


class SnapshotCopied(Event, frozen=True, kw_only=True):
    """A host has a copy of a rank's snapshot that another one has; or can't have it."""

    host: HostId
    rank: int
    snapshot: At
    failed: bool = False


class CheckpointGone(Event, frozen=True, kw_only=True):
    """A committed checkpoint can't be restored any more: retention let it go, or it isn't what its manifest
    says.
    """

    folder: str


class CommitFailed(Event, frozen=True, kw_only=True):
    folder: str
    reason: str
    cause: Failure | None = None
    """If no checkpoint that is saved this way can be committed."""


class TimerName(enum.StrEnum):
    SETTLE = "settle"
    FINISH_REPORT = "finish report"
    KILL = "kill"
    BACKOFF = "backoff"
    RESERVE = "reserve"
    PREPARE = "prepare"
    START = "start"
    UPLOAD = "upload"
    MIGRATE = "migrate"
    GROW = "grow"
    BOUNDARY = "boundary"
    LAST_CHECKPOINT = "last checkpoint"
    SAY_SHORTAGE = "say shortage"
    REMEMBER = "remember"
    EXAMINE = "examine"


class TimerFired(Event, frozen=True, kw_only=True):
    timer: TimerName
    key: int
    """Which restart or reservation it belongs to."""
