"""The journal: the one record of a run. What happened, what was decided, and every metric of rank 0.

It is one sequence of numbered objects, each made with put-if-absent, each holding records: a length, a
checksum and a typed msgpack body. Taking the run is a record in it, with the next lease; so a driver that was
paused and replaced collides at its next append, and stops. Old objects are put together into archives, which
the next object names. Reading ends at the first number that is missing, and in each object at the first
record that isn't whole.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.control import commands as c
from everstep.errors import FencedError, StorageError
from everstep.storage.store import Store, open_store

FOLDER = "journal"
FORMAT = 2
COMPACT_AFTER = 200
"""So many small objects are put into one."""
MERGE_AFTER = 32
"""And so many of those into one."""

_ARCHIVE = "archive-"
_SCANS = 20
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
    """What its engine knows it by, if it has ways of its own to tell whether it lives."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Entry(msgspec.Struct, frozen=True, tag=True):
    """What only the driver writes; the brain's own records stand beside these."""


class Opened(Entry, frozen=True):
    """A driver takes the run."""

    format: int
    lease: int
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
    """No two drivers write the same bytes: who sees its own knows that it won."""


class Renewed(Entry, frozen=True):
    """The owner lives, and had nothing else to say for a while."""

    at: float


class TakenOver(Entry, frozen=True):
    """Workers of an earlier driver go on under this one: it is the same start, with the same budgets."""

    at: float
    epoch: int


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


class Deleted(Entry, frozen=True):
    """Retention lets go of a checkpoint. Written before it is done."""

    at: float
    folder: str


class Damaged(Entry, frozen=True):
    """A checkpoint can't be restored any more, and why."""

    at: float
    folder: str
    reason: str


class Metrics(Entry, frozen=True):
    """Rank 0's reports, from ``first`` on; with replica groups, while rank 0's is being replaced, those of
    the first rank that trains.
    """

    epoch: int
    first: int
    rows: list[msgspec.Raw]
    group: int = 0
    generation: int = 0


class Closed(Entry, frozen=True):
    at: float
    outcome: str
    message: str
    value: bytes | None
    """What rank 0 returned, if that is plain data."""


class Snapshot(Entry, frozen=True):
    """What came before this record is in these objects, and no longer in numbered ones."""

    archives: list[str]


AnyRecord = (
    Opened
    | Renewed
    | TakenOver
    | Committed
    | Deleted
    | Damaged
    | Metrics
    | Closed
    | Snapshot
    | c.PhaseChanged
    | c.GroupsStarting
    | c.Waiting
    | c.FailureSeen
    | c.RecoveryDecided
    | c.GroupStarted
    | c.Recovered
    | c.CheckpointKept
    | c.HostSetAside
    | c.PreemptionSeen
)

_decoder = msgspec.msgpack.Decoder(AnyRecord)
_encoder = msgspec.msgpack.Encoder()


def key_of(number: int) -> str:
    return f"{number:010d}"


def encode(record: AnyRecord) -> bytes:
    body = _encoder.encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> Iterator[AnyRecord]:
    """The whole records of an object."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        yield _decoder.decode(body)
        at += _HEAD.size + length


class Journal:
    """A driver's hand on the journal. ``append`` collects; ``flush`` makes durable, or raises
    ``FencedError``.
    """

    def __init__(self, store: Store, number: int, first: int, archives: list[str]) -> None:
        self._store = store
        self._next = number
        self._first = first
        self._archives = archives
        self._waiting: list[bytes] = []
        self._unsure = b""
        """What is being written, and may or may not be there already."""
        self._flushing = threading.Lock()
        self._lost: FencedError | None = None

    def append(self, record: AnyRecord) -> None:
        self._waiting.append(encode(record))

    @property
    def has_news(self) -> bool:
        return bool(self._waiting or self._unsure)

    def flush(self) -> bool:
        """Write what was appended. True if there was something. What storage refuses is tried again the next
        time.
        """
        with self._flushing:
            if self._lost is not None:
                raise self._lost
            wrote = False
            while self.has_news:
                if not self._unsure:
                    waiting, self._waiting = self._waiting, []
                    self._unsure = b"".join(waiting)
                # An error may hide that it was written: the same bytes again then find themselves.
                if not self._store.create(key_of(self._next), self._unsure):
                    self._lost = FencedError(f"the run was taken over by {self._holder()}")
                    raise self._lost
                self._unsure = b""
                self._next += 1
                wrote = True
            return wrote

    def _holder(self) -> str:
        """Who wrote what we would have written."""
        owner = "another driver"
        for number in range(self._next, self._next + 1000):
            data = self._store.read(key_of(number))
            if data is None:
                break
            for record in decode(data):
                if isinstance(record, Opened):
                    owner = str(record.owner)
        return owner

    # ------------------------------------------------------------------ compaction

    @property
    def is_long(self) -> bool:
        return self._next - self._first >= COMPACT_AFTER

    def compact(self) -> None:
        """Put many small objects into a large one. Nothing is forgotten by it."""
        self.flush()
        with self._flushing:
            first, last = self._first, self._next
            merged = self._archives if len(self._archives) >= MERGE_AFTER else []
            small = [key_of(number) for number in range(first, last)]
            data = b"".join(self._store.read(name) or b"" for name in [*merged, *small])
            name = f"{_ARCHIVE}{last:010d}-{secrets.token_hex(4)}"
            if not self._store.create(name, data):
                return
            self._archives = [*(a for a in self._archives if a not in merged), name]
            self._waiting.insert(0, encode(Snapshot(self._archives)))
        self.flush()
        self._first = last
        self._store.delete([*merged, *small])


class Scan:
    """A journal as it was at one time: what it says, and where the next object goes."""

    def __init__(self, run: Store) -> None:
        self._store = run.child(FOLDER)
        self.archives: list[str] = []
        self._archived: list[bytes] = []
        self._objects: dict[int, bytes] = {}
        for _ in range(_SCANS):
            if self._scan():
                return
        raise StorageError(
            f"the journal of {run.address()} can't be read: objects that are listed are not there",
            "look whether something else removes files there",
        )

    def _scan(self) -> bool:
        """False if the owner was compacting it meanwhile: what was listed is then in an archive by now."""
        numbers = self._numbers()
        if numbers is None:
            return False
        found: dict[int, bytes] = {}
        self.archives = []
        # A compaction that was cut off leaves old objects before its snapshot: look for that from the end.
        for number in numbers:
            data = self._store.read(key_of(number))
            if data is None:
                return False
            found[number] = data
            first = next(decode(data), None)
            if isinstance(first, Snapshot):
                self.archives = first.archives
                break
        else:
            if numbers and numbers[-1] != 1:
                return False
        archived = [self._store.read(name) for name in self.archives]
        if None in archived:
            return False
        if not _is_continued(numbers, self._numbers()):
            return False
        self._archived = [data for data in archived if data is not None]
        self._objects = {}
        for number in sorted(found):
            if self._objects and number - 1 not in self._objects:
                break  # a hole: what comes after it was never ours to read
            self._objects[number] = found[number]
        return True

    def _numbers(self) -> list[int] | None:
        """Of the objects that are there, from the last to the first; None if the list can't be right.

        What comes and goes while a folder is listed may be missing from the list, although at every instant
        something is there: what was archived comes before an object that is there, or is about to be.
        """
        names = [file.path for file in self._store.list()]
        numbers = sorted((int(name) for name in names if name.isdigit()), reverse=True)
        archived = max((int(name.split("-")[1]) for name in names if name.startswith(_ARCHIVE)), default=0)
        return numbers if archived <= max(numbers, default=0) + 1 else None

    @property
    def first(self) -> int:
        return min(self._objects, default=1)

    @property
    def next(self) -> int:
        return max(self._objects, default=0) + 1

    def records(self) -> Iterator[AnyRecord]:
        """Every whole record, in order."""
        for data in self._archived:
            yield from decode(data)
        for number in sorted(self._objects):
            yield from decode(self._objects[number])


def _is_continued(before: list[int], now: list[int] | None) -> bool:
    """Whether nothing happened to a journal but that it grew."""
    last = before[0] if before else 0
    newer = len(now or ()) - len(before)
    return newer >= 0 and now == [*range(last + newer, last, -1), *before]


def read(run: Store | Path | str) -> Iterator[AnyRecord]:
    """Every whole record of a run, in order."""
    return Scan(open_store(str(run)) if isinstance(run, Path | str) else run).records()


def me(engine: str = "") -> Owner:
    """This process, as an owner."""
    from everstep.agent import kernel

    boot = Path("/proc/sys/kernel/random/boot_id")
    return Owner(
        os.uname().nodename,
        boot.read_text().strip() if boot.exists() else "",
        os.getpid(),
        kernel.start_time(os.getpid()) or 0,
        engine,
    )
