"""What driver, agents and workers say to each other, and how it looks as bytes.

A frame is a length (4 bytes, little-endian) and a msgpack body. Nothing here is pickled but the user's own
function, config, return value and broadcast values, which stay opaque bytes. Every message about workers
carries its epoch and generation, every order of a driver its lease; who reads it refuses what is stale.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from everstep.agent.script import Script
from everstep.backend.base import Endpoint, Member
from everstep.control.failures import Kind
from everstep.control.reports import Part
from everstep.control.snapshots import At, Copy
from everstep.control.vitals import Finding, Vitals
from everstep.storage.store import Limits
from everstep.topology.placement import Assignment

WIRE_VERSION = 9
"""Driver and agent compare it before anything else is said (``Attach``, ``Status``): of these two messages
nothing is ever removed or changed.
"""
MAX_PAYLOAD = 256 << 20
"""What a user may send at once: the function and its config, the metrics of a report, a return value, a
broadcast. Whoever takes it from the user checks it, and says what is too large.
"""
MAX_FRAME = MAX_PAYLOAD + (16 << 20)
"""With what goes around it: an environment, paths, a message inside another."""
MAX_TEXT = 1 << 18

_LENGTH = struct.Struct("<I")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over a socket."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(
            f"a {type(message).__name__} message of {len(body)} bytes: at most {MAX_FRAME} are read"
        )
    return _LENGTH.pack(len(body)) + body


def described(error: BaseException) -> str:
    """An exception as a text that can be sent, whatever its class and its message are."""
    try:
        text = str(error)
    except Exception:  # the user's own class: the traceback says more
        text = "its message can't be shown, since its __str__ raises"
    return clip(f"{type(error).__name__}: {text}".strip())


def clip(text: str) -> str:
    """The beginning and the end of a text that may be of any length (an exception's message), and may have
    what isn't text in it (the name of a file).
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def as_size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def encode_odd(value: Any) -> Any:
    """NumPy scalars, and arrays and tensors without dimensions, are numbers; the rest is refused by name."""
    item = getattr(value, "item", None)
    if callable(item) and tuple(getattr(value, "shape", ())) == ():
        return item()
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} is not a number, string, list or dict"
    )


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_odd)


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete now."""
        buffer = self._buffer
        buffer += data
        start = 0
        size = len(buffer)
        with memoryview(buffer) as view:
            bodies = []
            while size - start >= 4:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME:
                    raise ValueError(f"a frame of {length} bytes: this is not Everstep's protocol")
                if size - start - 4 < length:
                    break
                bodies.append(bytes(view[start + 4 : start + 4 + length]))
                start += 4 + length
        if start:
            del buffer[:start]
        return iter(bodies)


# ---------------------------------------------------------------------- driver → agent


class WorkerSpec(msgspec.Struct, frozen=True):
    """All that a worker is told when it starts."""

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
    """How often its agent looks at its progress."""
    quiet_s: float = 10.0
    """Without progress for this long, its agent tells the driver how it does."""
    spool: str = ""
    """Where snapshots of asynchronous reports lie; empty: the user's cache folder."""
    scratch: str = ""
    """Its temporary folder, which goes with it; empty: the one that all processes share."""
    fingerprint: str = ""
    """Of the code and config that it runs."""
    lighthouse: str = ""
    """Where its agent forwards to torchft's lighthouse, if there is one."""
    snapshot: At | None = None
    """What it restores from its host's memory."""
    snapshot_every: int = 0
    """With every how-many-th report it takes a snapshot, until it is told otherwise; 0: with none."""
    memory_fraction: float = 0.0
    """Of its host's memory: how much all snapshots there may take."""


class ToAgent(msgspec.Struct, frozen=True, tag=True):
    pass


class Attach(ToAgent, frozen=True):
    """The first word on a connection."""

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


class Stop(ToAgent, frozen=True):
    lease: int
    epoch: int
    generation: int
    ranks: list[int]
    grace_s: float


class Tell(ToAgent, frozen=True):
    """Pass ``body`` (a framed ``ToWorker``) on to these ranks."""

    lease: int
    epoch: int
    ranks: list[int]
    body: bytes


class Acknowledge(ToAgent, frozen=True):
    """What these ranks said before ``offset`` is durable, and need not be kept. ``state`` sums it up for a
    later driver.
    """

    lease: int
    epoch: int
    ranks: list[tuple[int, int, int, bytes]]
    """(generation, rank, offset, state)."""


class Examine(ToAgent, frozen=True):
    """Find out where every worker of this epoch is: ``Examined``."""

    lease: int
    epoch: int
    look: int


class Retire(ToAgent, frozen=True):
    """You counted as lost: end your workers, and say when it is done."""

    lease: int


class Shutdown(ToAgent, frozen=True):
    lease: int


class RunLighthouse(ToAgent, frozen=True):
    """Have torchft's lighthouse here: ``LighthouseUp`` once it listens. It is put back when it dies."""

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
    | Stop
    | Tell
    | Acknowledge
    | Examine
    | Retire
    | Shutdown
    | RunLighthouse
    | Forward
)


# ---------------------------------------------------------------------- agent → driver


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
    """``LOAD`` or ``STORAGE``, which no retry cures, ``TEMPLATE`` or ``START``."""
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
    """Where what it says again begins."""
    state: bytes
    """What the earlier driver said of all that came before."""
    stopping: bool = False
    """The earlier driver had told it to end."""


class Inventory(FromAgent, frozen=True):
    """Answers a later driver's claim: what runs here, also what has ended. What they said follows."""

    workers: list[Held]
    lighthouse: str = ""
    """Where it is, if it is here."""
    copies: list[Copy] = []
    """Snapshots that are whole, in this host's memory; ``host`` is empty."""


class HandedOver(FromAgent, frozen=True):
    """Everything that was left from an earlier driver has been told; from here on it is news."""


class Output(FromAgent, frozen=True):
    rank: int
    text: str


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
    look: int
    found: list[Finding]


class Uploaded(FromAgent, frozen=True):
    """The agent has finished an upload that its worker did not live to finish; or could not."""

    epoch: int
    generation: int
    rank: int
    index: int
    part: Part | None
    reason: str = ""


class Gone(FromAgent, frozen=True):
    epoch: int
    generation: int
    ranks: list[int]


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


# ---------------------------------------------------------------------- worker → driver


class FromWorkerMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class Hello(FromWorkerMessage, frozen=True):
    """The process runs; the leader of a group says where its rendezvous is."""

    pid: int
    endpoint: Endpoint | None = None


class Joined(FromWorkerMessage, frozen=True):
    """It is part of its group; the training function starts."""


class Report(FromWorkerMessage, frozen=True, tag="r"):
    index: int
    metrics: msgspec.Raw
    part: Part | None = None
    owed: bool = False
    """Its part is still being uploaded."""
    restore_s: float = 0.0
    bound: bool = False
    """By this process, and nobody else can: a function of the user's uploads it."""
    copied: bool = False
    """Its host has a snapshot of this report in memory."""
    copy_s: float = 0.0
    """How long training waited for that."""
    copying: bool = False
    """The snapshot is being taken: ``Copied`` follows."""
    silent: bool = False
    """It has no metrics: it brings what is to be saved when the function has returned."""


class Copied(FromWorkerMessage, frozen=True):
    """Its host has a snapshot in memory, which was taken while training went on."""

    index: int
    """The report that it is of."""
    copy_s: float
    """How long training waited for it, all the same."""
    whole_s: float
    """How long it took."""


class PartDone(FromWorkerMessage, frozen=True):
    part: Part


class PartFailed(FromWorkerMessage, frozen=True):
    index: int
    reason: str


class NoMemory(FromWorkerMessage, frozen=True):
    """Its host has no memory for this rank's snapshots."""

    reason: str


class Ask(FromWorkerMessage, frozen=True):
    """Something that needs an answer: a collective of the control plane, or a question about checkpoints."""

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
    lost_snapshot: bool = False
    """The snapshot in memory that it was given could not be restored."""
    final: bool = False
    """It would happen again every time."""


AnyFromWorker = (
    Hello | Joined | Report | Copied | PartDone | PartFailed | NoMemory | Ask | Counted | Returned | Raised
)


# ---------------------------------------------------------------------- driver → worker


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    pass


class Rendezvous(ToWorker, frozen=True):
    endpoint: Endpoint


class Answer(ToWorker, frozen=True):
    seq: int
    body: bytes
    error: str = ""


class Listed(msgspec.Struct, frozen=True):
    """A committed checkpoint. A list of these answers a question about checkpoints."""

    address: str
    external: bool
    """Somebody else has put it there."""
    metrics: dict[str, Any]


class Committed(ToWorker, frozen=True):
    folder: str
    index: int


class Kept(ToWorker, frozen=True):
    """The snapshot ``at`` stays, and nothing else up to ``upto`` is needed."""

    at: At | None
    upto: At


class WantCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """What ``should_checkpoint()`` says; empty: no."""

    reason: str


class PreemptionTold(msgspec.Struct, frozen=True, tag=True):
    """What ``get_preemption_info()`` says."""

    deadline_ms: int | None
    node_to_ranks: dict[str, list[int]]
    """Empty: the notice was cancelled."""


class StateDue(msgspec.Struct, frozen=True, tag=True):
    """The state is to be written to storage, for the ``turn``-th time."""

    turn: int


class SnapshotEvery(msgspec.Struct, frozen=True, tag=True):
    """A snapshot is taken with every so-many-th report; 0: with none."""

    reports: int


AnyValue = WantCheckpoint | PreemptionTold | StateDue | SnapshotEvery


class Propose(ToWorker, frozen=True):
    """A value is to change in all ranks at the same call: say how many calls there were (``Counted``)."""

    number: int
    value: AnyValue


class Agree(ToWorker, frozen=True):
    """What was proposed under this number holds from call ``start`` on."""

    number: int
    start: int


class Undriven(ToWorker, frozen=True):
    """From the agent itself: there is no driver now, or there is one again."""

    now: bool


AnyToWorker = Rendezvous | Answer | Committed | Kept | Propose | Agree | Undriven

to_agent = msgspec.msgpack.Decoder(AnyToAgent)
from_agent = msgspec.msgpack.Decoder(AnyFromAgent)
from_worker = msgspec.msgpack.Decoder(AnyFromWorker)
to_worker = msgspec.msgpack.Decoder(AnyToWorker)
listing = msgspec.msgpack.Decoder(list[Listed])


# ---------------------------------------------------------------------- worker ↔ agent, about memory


class MemoryRequest(msgspec.Struct, frozen=True, tag=True):
    """One packet each, on a socket of their own. The answer comes with descriptors."""


class NewSlots(MemoryRequest, frozen=True):
    """Room for so many snapshots, or for none: files of these sizes."""

    sizes: dict[str, int]
    count: int
    needed: bool = False
    """Without them nothing can be saved: they are given in any case."""


class OldSlots(MemoryRequest, frozen=True):
    """What is there of this rank's, from before."""


class DropSlot(MemoryRequest, frozen=True):
    """This one isn't needed any more."""

    number: int


class StoreSlot(MemoryRequest, frozen=True):
    """Write this one to storage: ``Stored`` once that is over. It comes with a descriptor of a file that says
    whose share of which checkpoint it is.
    """

    number: int
    held: bool
    """The worker waits for its commit."""


class MemoryAnswer(msgspec.Struct, frozen=True, tag=True):
    pass


class Stored(MemoryAnswer, frozen=True):
    """Nobody reads this slot any more."""

    number: int


class Slots(MemoryAnswer, frozen=True):
    """(number, names of its files). With each come a descriptor of its notes and one of each file, in the
    order of the names.
    """

    slots: list[tuple[int, list[str]]]
    storing: list[int] = []
    """Those of them that are being written to storage."""
    refused: str = ""
    """Why there is none."""


memory_request = msgspec.msgpack.Decoder(NewSlots | OldSlots | DropSlot | StoreSlot)
memory_answer = msgspec.msgpack.Decoder(Slots | Stored)


# ---------------------------------------------------------------------- agent ↔ template


class TemplateOrder(msgspec.Struct, frozen=True, tag=True):
    pass


class Load(TemplateOrder, frozen=True):
    code: bytes
    config: bytes
    python_path: list[str]
    preload: list[str]
    probe_s: float
    may_fork: bool
    script: Script = Script()


class Fork(TemplateOrder, frozen=True):
    """Comes with four descriptors: the worker's ends of its socket and of the one for memory, where its
    output goes, and its progress.
    """

    spec: WorkerSpec


class End(TemplateOrder, frozen=True):
    pid: int
    signal: int


AnyOrder = Load | Fork | End


class TemplateWord(msgspec.Struct, frozen=True, tag=True):
    pass


class Loaded(TemplateWord, frozen=True):
    forks: bool
    why_not: str
    seconds: float


class LoadFailed(TemplateWord, frozen=True):
    message: str
    traceback: str


class Forked(TemplateWord, frozen=True):
    rank: int
    epoch: int
    pid: int


class Ended(TemplateWord, frozen=True):
    pid: int
    status: int
    peak_rss: int
    by_us: bool


AnyWord = Loaded | LoadFailed | Forked | Ended

order = msgspec.msgpack.Decoder(AnyOrder)
word = msgspec.msgpack.Decoder(AnyWord)
