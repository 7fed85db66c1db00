"""The journal: the one record of a run. What happened, what was decided, and every metric of rank 0.

A folder of append-only files, one for each driver that had the run, in order. A record is a length, a
checksum and a typed msgpack body; a file that is cut off anywhere reads up to its last whole record.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.control import commands as c
from everstep.storage import folder as disk

FOLDER = "journal"
FORMAT = 1

_HEAD = struct.Struct("<II")


class Entry(msgspec.Struct, frozen=True, tag=True):
    """What only the driver writes; the brain's own records stand beside these."""


class Opened(Entry, frozen=True):
    format: int
    lease: int
    at: float
    wall: float
    """UNIX time that belongs to ``at``."""
    version: str
    name: str
    workers_min: int
    workers_max: int
    pid: int
    fingerprint: str = ""
    """Of the training function, its config and what it imports of the user's."""


class Committed(Entry, frozen=True):
    """A checkpoint exists: its manifest is written."""

    at: float
    folder: str
    epoch: int
    index: int
    metrics: msgspec.Raw
    external: str | None


class Deleted(Entry, frozen=True):
    """Retention lets go of a checkpoint. Written before it is done."""

    at: float
    folder: str


class Metrics(Entry, frozen=True):
    """Rank 0's reports, from ``first`` on."""

    epoch: int
    first: int
    rows: list[msgspec.Raw]


class Closed(Entry, frozen=True):
    at: float
    outcome: str
    message: str
    value: bytes | None
    """What rank 0 returned, if that is plain data."""


AnyRecord = (
    Opened
    | Committed
    | Deleted
    | Metrics
    | Closed
    | c.PhaseChanged
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


class Journal:
    """A driver's own file of the journal. ``append`` buffers; ``flush`` makes durable."""

    def __init__(self, run: Path, lease: int) -> None:
        folder = run / FOLDER
        disk.make_private(folder)
        self.path = folder / f"{lease:06d}.log"
        self._fd = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        disk.sync_folder(folder)
        self._buffer: list[bytes] = []
        self._flushing = threading.Lock()

    def append(self, record: AnyRecord) -> None:
        body = _encoder.encode(record)
        self._buffer.append(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def flush(self, sync: bool = True) -> None:
        """Write what was appended."""
        with self._flushing:
            waiting, self._buffer = self._buffer, []
            if waiting:
                data = memoryview(b"".join(waiting))
                while data:
                    data = data[os.write(self._fd, data) :]
            if sync and waiting:
                os.fsync(self._fd)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


def segments(run: Path) -> list[Path]:
    folder = run / FOLDER
    return sorted(folder.glob("*.log")) if folder.is_dir() else []


def read(run: Path) -> Iterator[AnyRecord]:
    """Every whole record, in order."""
    for path in segments(run):
        data = path.read_bytes()
        at = 0
        while at + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != checksum:
                break
            yield _decoder.decode(body)
            at += _HEAD.size + length
