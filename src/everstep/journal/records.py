"""The journal's records, and how they look as bytes: a length, a checksum and a typed msgpack body.

The controller's own records (``control.commands``) stand beside those here, which only the driver writes. Of
both kinds, what users are told of is a ``control.commands.Record``.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator

import msgspec

from everstep.control import commands as c
from everstep.errors import JournalFormatError
from everstep.health.stragglers import Slowness
from everstep.saved.checkpoints import CheckpointRef
from everstep.topology.slices import HostId

FORMAT = 3
"""2 had leases that were counted, and snapshots only at the beginning of an object."""
OLDEST = FORMAT - 1
"""That is read."""

RECOVERED, RESTARTED = "recovered", "restarted"
"""How a straggler's slowness ended (``StragglerSeen.over``)."""

_HEAD = struct.Struct("<II")


class Owner(msgspec.Struct, frozen=True):
    """Who drives a run, told apart for good: a pid is used again, with its start time and the machine's boot
    it isn't.
    """

    host: str
    boot: str
    pid: int
    started: int
    engine: str = ""
    """Its name for the engine (``Engine.whoami``), if the engine can prove its death."""
    pid_namespace: str = ""
    """In which ``pid`` and ``started`` mean something: namespaces of processes, and of time where there are
    any. Containers that share a host name need not share these.
    """

    @property
    def clock(self) -> tuple[str, ...]:
        """Which monotonic clock it goes by; empty: not known. Containers of a machine share one, unless they
        have a namespace of time.
        """
        return (self.boot, *self.pid_namespace.split()[1:]) if self.boot else ()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Entry(msgspec.Struct, frozen=True, tag=True):
    """What only the driver writes; the controller's own records stand beside these."""


class Opened(Entry, frozen=True):
    """A driver takes the run."""

    format: int
    lease: int
    """The number of the object that holds this record: so it always grows, even if other records are lost."""
    owner: Owner
    at: float
    wall: float
    """UNIX time that belongs to ``at``."""
    version: str
    name: str
    workers_min: int
    workers_max: int
    fingerprint: str
    """Of the training function, its config and what it imports of the user's."""
    config: str
    """Of the config alone."""
    nonce: str
    """No two drivers write the same bytes: a driver that reads its own back knows that it won."""
    ttl_s: float = 0.0
    """Silence after which another driver may take the run: this owner renews its lease more often."""
    score: str | None = None
    """The metric that checkpoints are ranked by (``CheckpointConfig.checkpoint_score_attribute``)."""
    score_order: str = "max"
    run_id: str = ""
    """Of the run: every driver that takes it says the same."""
    metrics_url: str = ""
    """Where this driver serves the run's metrics for Prometheus, if it does."""
    code: dict[str, str] = {}
    """Of what workers run, by name: the training function, ``ScalingConfig``, the user's modules by path.
    Empty: written by an earlier version.
    """


class Renewed(Entry, frozen=True):
    """The owner lives, and had nothing else to say for a while."""

    at: float


class TakenOver(Entry, frozen=True):
    """Workers of an earlier driver go on under this one: it is the same start, with the same budgets."""

    at: float
    epoch: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker runs."""

    rank: int
    host: str
    slice: str
    group: int


class Placed(Entry, frozen=True):
    """Where workers run from now on, as far as that differs from before."""

    at: float
    places: list[Place]
    gone: list[int]
    """Ranks that there are no more."""


class Committed(Entry, frozen=True):
    """A checkpoint exists: its manifest is written."""

    at: float
    folder: str
    epoch: int
    index: int
    metrics: msgspec.Raw
    external: str | None
    group: int = 0
    generation: int = 0
    order: int = 0
    state: bool = False
    """It holds the training state, in files that Everstep made."""
    validation: bytes = b""
    """How it is to be validated; empty: it isn't."""

    @classmethod
    def of(
        cls,
        at: float,
        ref: CheckpointRef,
        metrics: msgspec.Raw,
        external: str | None = None,
        validation: bytes = b"",
    ) -> Committed:
        return cls(
            at=at,
            folder=ref.folder,
            epoch=ref.epoch,
            index=ref.index,
            metrics=metrics,
            external=external,
            group=ref.group,
            generation=ref.generation,
            order=ref.order,
            state=ref.state,
            validation=validation,
        )


class Validated(Entry, frozen=True):
    """A checkpoint's validation is over."""

    at: float
    folder: str
    status: str
    """How it went: a ``ReportedCheckpointStatus``."""
    metrics: msgspec.Raw
    """What it came to, in addition to what was reported with the checkpoint."""


class Deleted(Entry, frozen=True):
    """A folder is given up: by retention, or because it can't become a checkpoint any more. Written before
    anything is removed.
    """

    at: float
    folder: str


class Damaged(Entry, frozen=True):
    """A checkpoint can't be restored any more, and why."""

    at: float
    folder: str
    reason: str


class Stalled(Entry, frozen=True):
    """Training of a replica group stood still for checkpoints, for so many seconds until ``at`` that no
    earlier record tells of.
    """

    at: float
    epoch: int
    group: int
    generation: int
    upto: int
    """The newest report that it includes: a later driver may receive that again."""
    seconds: float


class Metrics(Entry, frozen=True):
    """Rank 0's reports, from ``first`` on; with replica groups, while rank 0's is being replaced, those of
    the first rank that trains.
    """

    epoch: int
    first: int
    rows: list[msgspec.Raw]
    group: int = 0
    generation: int = 0
    number: int = 0
    """Of the first row in training; 0: it follows from the records before."""


class Closed(Entry, frozen=True):
    at: float
    outcome: str
    message: str
    value: bytes | None
    """What rank 0 returned, if that is plain data."""


class Compacted(Entry, frozen=True, tag="Snapshot"):
    """The records of all objects below number ``upto`` are in these archives."""

    archives: list[str]
    upto: int = 0
    """0, of format 2: the number of the object that holds this record."""


class StragglerSeen(c.Record, frozen=True, tag="straggler"):
    """These ranks are slower than their peers from now on; or not any more."""

    epoch: int
    ranks: tuple[int, ...]
    host: HostId
    kind: Slowness
    slower: float
    """By this share of what the peers take."""
    over: str = ""
    """Why they aren't any more: ``recovered`` or ``restarted``."""


class RecoveredWithoutReport(c.Recovered, frozen=True, tag="recovered without report"):
    """The same of a training function that has reported nothing since: it has ended. So its first step, which
    ``first_step_s`` counts up to that end, and the steps that were lost aren't known.
    """


AnyRecord = (
    Opened
    | Renewed
    | TakenOver
    | Placed
    | Committed
    | Validated
    | Deleted
    | Damaged
    | Stalled
    | Metrics
    | Closed
    | Compacted
    | c.PhaseChanged
    | c.GroupsStarting
    | c.Waiting
    | c.FailureSeen
    | c.HangSeen
    | StragglerSeen
    | c.RecoveryDecided
    | c.GroupStarted
    | c.Recovered
    | RecoveredWithoutReport
    | c.CheckpointKept
    | c.HostSetAside
    | c.PreemptionSeen
)

_decoder = msgspec.msgpack.Decoder(AnyRecord)
_encoder = msgspec.msgpack.Encoder()


def encode(record: AnyRecord) -> bytes:
    body = _encoder.encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes, damaged: Callable[[str], None] = lambda damage: None) -> Iterator[AnyRecord]:
    """The records of an object. ``damaged`` is called for what can't be read; what follows it is read where
    possible.
    """
    if not data:
        damaged("is empty")
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            damaged(f"ends in the middle of a record, at byte {at}")
            return
        length, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length:
            damaged(f"ends in the middle of a record, at byte {at}")
            return
        if not length:  # zeros, of which the checksum is right
            damaged(f"has no record at byte {at}")
            return
        if zlib.crc32(body) != checksum:
            damaged(f"has a record with a wrong checksum, at byte {at}")
        else:
            yield _typed(body)
        at += _HEAD.size + length


def _typed(body: bytes) -> AnyRecord:
    try:
        record: AnyRecord = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise JournalFormatError(
            f"the journal was written by a newer Everstep ({error})", "upgrade Everstep"
        ) from error
    if isinstance(record, Opened):
        _check_format(record)
    return record


def _check_format(opened: Opened) -> None:
    found = f"the journal was written by Everstep {opened.version} in format {opened.format}"
    if opened.format > FORMAT:
        raise JournalFormatError(
            f"{found}, which is newer than what this one reads ({OLDEST} to {FORMAT})", "upgrade Everstep"
        )
    if opened.format < OLDEST:
        raise JournalFormatError(
            f"{found}, which is older than what this one reads ({OLDEST} to {FORMAT})",
            f"finish the run with Everstep {opened.version}, or give this one another name; its checkpoints "
            "can be read as Checkpoint(path)",
        )


def this_process(engine: str = "") -> Owner:
    """This process, as an owner."""
    from everstep.process import kernel

    return Owner(
        os.uname().nodename,
        kernel.boot_id(),
        os.getpid(),
        kernel.start_time(os.getpid()) or 0,
        engine,
        _pid_namespace(),
    )


def _pid_namespace() -> str:
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""  # not Linux
    try:
        return f"{processes} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return processes  # a kernel with one time for all
