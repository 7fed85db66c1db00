"""Messages between the driver and its workers. Agents pass them on as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.backend.base import Endpoint
from everstep.health.stragglers import Pace
from everstep.saved.reports import Part
from everstep.saved.snapshots import At


class FromWorkerMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(FromWorkerMessage, frozen=True):
    """The process runs; the leader of a group has opened the endpoint of its rendezvous."""

    pid: int
    endpoint: Endpoint | None = None


class Joined(FromWorkerMessage, frozen=True):
    """It is part of its group; the training function starts."""


class Report(FromWorkerMessage, frozen=True, tag="r", omit_defaults=True, gc=False):
    """There may be very many: most have a few of these fields, and all of them have a few bytes."""

    index: int
    metrics: msgspec.Raw
    part: Part | None = None
    owed: bool = False
    """Its part is still being uploaded."""
    restore_s: float = 0.0
    bound: bool = False
    """By this process, and nobody else can: a function of the user's uploads it."""
    taken: bool = msgspec.field(default=False, name="copied")
    """Its host has a snapshot of this report in memory."""
    copy_s: float = 0.0
    """How long training waited for that."""
    taking: bool = msgspec.field(default=False, name="copying")
    """The snapshot is being taken: ``SnapshotTaken`` follows."""
    silent: bool = False
    """It has no metrics: it brings what is to be saved when the function has returned."""
    pace: Pace | None = None
    """What the step took that it ends."""
    at: float | None = None
    """When it was made, by the monotonic clock of its host; None: not known."""


class SnapshotTaken(FromWorkerMessage, frozen=True, tag="Copied"):
    """Its host has a snapshot in memory, which was taken while training went on."""

    index: int
    """The report that it is of."""
    copy_s: float
    """How long training waited for it, all the same."""
    whole_s: float
    """How long it took."""


class StallReported(FromWorkerMessage, frozen=True, tag="StallTold"):
    """Training stood still here for checkpoints, since the last of these messages."""

    index: int
    """The report that it was for, the last if it were several."""
    seconds: float


class PartDone(FromWorkerMessage, frozen=True):
    part: Part


class PartFailed(FromWorkerMessage, frozen=True):
    index: int
    reason: str


class NoMemory(FromWorkerMessage, frozen=True):
    """Its host has no memory for this rank's snapshots."""

    reason: str


class Question(FromWorkerMessage, frozen=True, tag="Ask"):
    """Needs an ``Answer``: a collective of the control plane, or a question about checkpoints."""

    seq: int
    what: str
    body: bytes = b""
    """For a question: the last report of this rank, which is to be dealt with before the answer."""
    turn: int = 0
    """For a collective: its index among those of this rank, from 1. Else 0."""


class Counted(FromWorkerMessage, frozen=True):
    """Answers ``Propose``; the worker's next call waits for ``Agree``."""

    number: int
    calls: int


class Returned(FromWorkerMessage, frozen=True):
    value: bytes | None
    problem: str = ""
    """Why there is none, although the function returned something."""


class Raised(FromWorkerMessage, frozen=True):
    message: str
    traceback: str
    echo: bool
    at: float
    """By the monotonic clock of its host, as in ``Exited``."""
    joined: bool
    """It had joined its group: the user's code was running."""
    damaged: str = ""
    """The folder of the checkpoint that could not be restored, if that was the reason."""
    lost_snapshot: At | None = None
    """The snapshot in memory that it was given, if that could not be restored."""
    final: bool = False
    """It would happen again every time."""


AnyFromWorker = (
    Hello
    | Joined
    | Report
    | SnapshotTaken
    | StallReported
    | PartDone
    | PartFailed
    | NoMemory
    | Question
    | Counted
    | Returned
    | Raised
)


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    pass


class Rendezvous(ToWorker, frozen=True):
    endpoint: Endpoint


class Answer(ToWorker, frozen=True):
    seq: int
    body: bytes
    error: str = ""


class Listed(msgspec.Struct, frozen=True):
    """A committed checkpoint. The answer to a question about checkpoints is a list of these."""

    address: str
    external: bool
    """The user's code has put it there."""
    metrics: dict[str, Any]
    status: str = "COMMITTED"


class CheckpointSettled(ToWorker, frozen=True, tag="CommitTold"):
    """The checkpoint of this report, and all before it, are committed or given up."""

    folder: str
    index: int


class Kept(ToWorker, frozen=True):
    """These snapshots stay, and nothing else up to ``upto`` is needed."""

    kept: tuple[At, ...]
    upto: At


class WantCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Why ``should_checkpoint()`` is true; empty: it is false."""

    reason: str


class Preemption(msgspec.Struct, frozen=True, tag="PreemptionTold"):
    """What ``get_preemption_info()`` returns."""

    deadline_ms: int | None
    node_to_ranks: dict[str, list[int]]
    """Empty: the notice was cancelled."""


class StateDue(msgspec.Struct, frozen=True, tag=True):
    """The state is to be written to storage, for the ``turn``-th time."""

    turn: int


class SnapshotEvery(msgspec.Struct, frozen=True, tag=True):
    """A snapshot is taken at every ``reports``-th report; 0: at none."""

    reports: int


AnyValue = WantCheckpoint | Preemption | StateDue | SnapshotEvery


class Propose(ToWorker, frozen=True):
    """A value is to change in all ranks at the same call. Answer how many calls there were (``Counted``)."""

    number: int
    value: AnyValue


class Agree(ToWorker, frozen=True):
    """What was proposed under this number holds from call ``start`` on."""

    number: int
    start: int


class Undriven(ToWorker, frozen=True):
    """From the agent itself: there is no driver now, or there is one again."""

    now: bool


AnyToWorker = Rendezvous | Answer | CheckpointSettled | Kept | Propose | Agree | Undriven


from_worker = msgspec.msgpack.Decoder(AnyFromWorker)
to_worker = msgspec.msgpack.Decoder(AnyToWorker)
listing = msgspec.msgpack.Decoder(list[Listed])
