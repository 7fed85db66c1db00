"""Messages between the driver and its agents.

Nothing here is pickled but the user's own function, config, return value and broadcast values, which stay
opaque bytes. Every message about workers carries its epoch and generation, every order of a driver its lease;
stale ones are refused. ``lease`` in these messages is ``Lease.precedence``, and not the number of the lease,
which stands in the journal.
"""

from __future__ import annotations

import msgspec

from everstep.backend.base import Member
from everstep.failures import Kind
from everstep.health.vitals import Finding, Vitals
from everstep.protocol.peer_messages import PeerAddress
from everstep.protocol.script import Script
from everstep.saved.reports import Part
from everstep.saved.snapshots import At, Copy
from everstep.storage.store import Limits
from everstep.topology.placement import Assignment

WIRE_VERSION = 14
"""Driver and agent compare it before all other messages (``Attach``, ``Status``): of these two messages
nothing is ever removed or changed.
"""


class StreamFile(msgspec.Struct, frozen=True):
    """A file that one stream of a worker is written to."""

    path: str
    tee: bool
    """The stream goes to the worker's log as well."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """All that a worker needs to know when it starts."""

    run_name: str
    run_folder: str
    epoch: int
    generation: int
    assignment: Assignment
    member: Member
    checkpoint: str | None
    """Folder of the checkpoint to restore, relative to the run's."""
    reason: str
    log_path: str
    seed: int
    start_timeout_s: float
    leave_timeout_s: float
    report_wait_s: float
    hold_s: float
    """How long a report waits for its checkpoint's commit, where the workers may change over at it."""
    all_metrics: bool
    """Whether metrics of ranks other than 0 are wanted (a callback looks at them)."""
    echo: bool
    """Whether what it prints is shown by the driver."""
    storage_options: dict[str, str] = {}
    storage_limits: Limits = Limits()
    look_s: float = 1.0
    """How often its agent measures its progress."""
    quiet_s: float = 10.0
    """After this long without progress, its agent sends the driver its vitals."""
    spool: str = ""
    """Where files of asynchronous reports are pinned until they are uploaded; empty: the user's cache
    folder.
    """
    scratch: str = ""
    """Its temporary folder, which goes with it; empty: the one that all processes share."""
    fingerprint: str = ""
    """Of the code and config that it runs."""
    lighthouse: str = ""
    """Where its agent forwards to torchft's lighthouse, if there is one."""
    snapshot: At | None = None
    """What it restores from memory."""
    snapshot_ranks: int = 0
    """How many ranks took that."""
    kept: tuple[At, ...] = ()
    """That and others, which may still be needed."""
    snapshot_every: int = 0
    """It takes a snapshot at every n-th report, until the driver proposes another number; 0: at none."""
    memory_fraction: float = 0.0
    """Of its host's memory: how much all snapshots there may take."""
    validates: bool = False
    """Checkpoints can be validated: the trainer has a function for it."""
    stdout: StreamFile | None = None
    """Its standard output's own file; None: it goes to the worker's log only."""
    stderr: StreamFile | None = None


class ToAgent(msgspec.Struct, frozen=True, tag=True):
    pass


class Attach(ToAgent, frozen=True):
    """The first message on a connection."""

    version: int
    run: str
    lease: int
    beat_s: float = 0.0
    """Above 0: this connection is for heartbeats only, this often."""


class Claim(ToAgent, frozen=True):
    run: str
    lease: int
    orphan_s: float
    owner: tuple[int, int]
    """(pid, start time) of the driver: an agent that nobody holds leaves once its owner is gone."""


class Unclaim(ToAgent, frozen=True):
    """End all workers and be free again."""

    lease: int


class Prepare(ToAgent, frozen=True):
    """Have a template that has loaded this code."""

    lease: int
    code: bytes
    config: bytes
    env: dict[str, str]
    python_path: list[str]
    cwd: str
    preload: list[str]
    probe_s: float
    run_folder: str
    storage_options: dict[str, str]
    storage_limits: Limits
    marker: str
    """An object that the driver has put into the run's storage, and that this host must see."""
    elsewhere: bool = False
    """The driver may be on another machine: ``env``, ``python_path`` and ``cwd`` only add to what is here."""
    script: Script = Script()


class Start(ToAgent, frozen=True):
    lease: int
    workers: list[WorkerSpec]
    sources: dict[int, list[PeerAddress]] = {}
    """Where the snapshot is that they restore, by the ranks that took it, if it isn't here."""


class CopySlot(ToAgent, frozen=True):
    """Have a copy of a rank's snapshot here: ``SlotCopied``."""

    lease: int
    rank: int
    at: At
    source: PeerAddress
    rate: float
    """Bytes a second, at most."""
    fraction: float
    """Of this host's memory: how much all snapshots here may take."""


class KeepSlots(ToAgent, frozen=True):
    """Of snapshots of ranks that aren't here, no others are needed."""

    lease: int
    kept: tuple[At, ...]


class Stop(ToAgent, frozen=True):
    lease: int
    epoch: int
    generation: int
    ranks: list[int]
    grace_s: float


class ToWorkers(ToAgent, frozen=True, tag="Tell"):
    """Pass ``body`` (a framed ``ToWorker``) on to these ranks."""

    lease: int
    epoch: int
    ranks: list[int]
    body: bytes


class Acknowledge(ToAgent, frozen=True):
    """Messages of these ranks before ``offset`` are durable, and need not be kept. ``state`` sums them up for
    a later driver.
    """

    lease: int
    epoch: int
    ranks: list[tuple[int, int, int, bytes]]
    """(generation, rank, offset, state)."""


class Examine(ToAgent, frozen=True):
    """Find out where every worker of this epoch is: ``Examined``."""

    lease: int
    epoch: int
    check: int = msgspec.field(name="look")


class Retire(ToAgent, frozen=True):
    """The agent counted as lost: it ends its workers, and sends ``Status(retired=True)`` when
    that is done.
    """

    lease: int


class RunLighthouse(ToAgent, frozen=True):
    """Run torchft's lighthouse here: ``LighthouseUp`` once it listens. It is restarted when it dies."""

    lease: int
    address: str
    """Of this host, as others reach it."""
    options: dict[str, int]


class Forward(ToAgent, frozen=True):
    """The lighthouse is at ``address``, for the workers of this host; empty: that isn't known yet."""

    lease: int
    address: str


AnyToAgent = (
    Attach
    | Claim
    | Unclaim
    | Prepare
    | Start
    | CopySlot
    | KeepSlots
    | Stop
    | ToWorkers
    | Acknowledge
    | Examine
    | Retire
    | RunLighthouse
    | Forward
)


class FromAgent(msgspec.Struct, frozen=True, tag=True):
    pass


class Status(FromAgent, frozen=True):
    host: str
    version: int
    pid: int
    run: str
    """The run that holds this host, or empty."""
    lease: int
    workers: int
    retired: bool = False
    """Answers ``Retire``: everything has ended."""


class Prepared(FromAgent, frozen=True):
    forks: bool
    """False where forking is unsafe, and workers start as fresh processes."""
    why_not: str
    seconds: float


class Unprepared(FromAgent, frozen=True):
    kind: Kind
    """``LOAD`` or ``STORAGE``, which aren't retried, ``TEMPLATE``, ``START``, or ``LIMIT``: one of the
    host's limits is too low for these workers."""
    message: str
    traceback: str


class Spawned(FromAgent, frozen=True):
    epoch: int
    generation: int
    rank: int
    pid: int


class FromWorker(FromAgent, frozen=True):
    """Bytes of a worker's stream, in order; frames may be cut anywhere."""

    epoch: int
    generation: int
    rank: int
    offset: int
    data: bytes


class Held(msgspec.Struct, frozen=True):
    """A worker that the agent has from an earlier driver."""

    spec: WorkerSpec
    pid: int
    offset: int
    """Where the messages begin that are sent again."""
    state: bytes
    """The earlier driver's summary of all that came before."""
    stopping: bool = False
    """The earlier driver had told it to end."""


class Inventory(FromAgent, frozen=True):
    """Answers a later driver's claim: what runs here, also what has ended. The workers' messages follow."""

    workers: list[Held]
    lighthouse: str = ""
    """Where it is, if it is here."""
    copies: list[Copy] = []
    """Snapshots that are whole, in this host's memory; ``host`` is empty."""


class HandedOver(FromAgent, frozen=True):
    """Everything that was left from an earlier driver has been sent; new messages follow."""


class Output(FromAgent, frozen=True):
    rank: int
    text: str
    echo: bool = False
    """It is about the failure of another rank."""


class Exited(FromAgent, frozen=True):
    """The process has ended; everything that it sent came before this."""

    epoch: int
    generation: int
    rank: int
    at: float
    """By the monotonic clock of its host, which means nothing anywhere else: ``Engine.time_here``."""
    code: int | None
    signal: int | None
    by_us: bool
    """We ended it."""
    oom: bool
    peak_rss: int
    log_tail: str
    log_path: str


class Quiet(FromAgent, frozen=True):
    """These workers have made no progress for a while."""

    epoch: int
    vitals: list[Vitals]


class Examined(FromAgent, frozen=True):
    epoch: int
    check: int = msgspec.field(name="look")
    found: list[Finding]


class Uploaded(FromAgent, frozen=True):
    """The agent has written a part of a checkpoint to storage, or could not: a snapshot, or what its worker
    did not live to upload.
    """

    epoch: int
    generation: int
    rank: int
    index: int
    part: Part | None
    reason: str = ""


class SlotCopied(FromAgent, frozen=True):
    """A copy of a rank's snapshot is here; or can't be."""

    rank: int
    at: At
    seconds: float = 0.0
    reason: str = ""
    """Why it can't be."""
    refused: bool = False
    """For lack of memory."""


class Gone(FromAgent, frozen=True):
    epoch: int
    generation: int
    ranks: list[int]
    copies: list[Copy] = []
    """What is in memory here now, as in an inventory: until they ended, they may have written over some."""


class Noticed(FromAgent, frozen=True):
    """This host will be taken away (``grace_s`` from now), or won't (None)."""

    grace_s: float | None


class LighthouseUp(FromAgent, frozen=True):
    address: str


class Beat(FromAgent, frozen=True):
    pass


AnyFromAgent = (
    Status
    | Uploaded
    | SlotCopied
    | Inventory
    | HandedOver
    | Prepared
    | Unprepared
    | Spawned
    | FromWorker
    | Output
    | Exited
    | Quiet
    | Examined
    | Gone
    | Noticed
    | LighthouseUp
    | Beat
)


to_agent = msgspec.msgpack.Decoder(AnyToAgent)
from_agent = msgspec.msgpack.Decoder(AnyFromAgent)
