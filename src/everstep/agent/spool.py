"""What a worker has sent and no driver has acknowledged yet: kept in memory, then on disk, and never dropped.

A stream of bytes with offsets. The driver acknowledges an offset once what came before it is durable
elsewhere; a later driver gets everything from there on again.

On disk it lies in segments, each a file, so that what is acknowledged gives its space back. What the disk has
no room for stays in memory, and ``full`` says that no more may be read until ``make_room`` finds some.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = 8 << 20
ON_DISK = 1 << 30
SEGMENT = 16 << 20


@dataclass
class _Segment:
    path: Path
    size: int = 0


class Spool:
    """The unacknowledged end of one worker's stream: first what is in memory, then segments on disk, then
    what did not fit there.
    """

    def __init__(
        self, path: Path, in_memory: int = IN_MEMORY, on_disk: int = ON_DISK, segment: int = SEGMENT
    ) -> None:
        self._path = path
        self._limits = (in_memory, on_disk, segment)
        self._memory: deque[bytes] = deque()
        self._in_memory = 0
        self._segments: deque[_Segment] = deque()
        self._made = 0
        self._unwritten = b""
        self._base = 0
        self.acknowledged = 0
        """Nobody needs what came before this offset any more."""

    @property
    def end(self) -> int:
        return self._base + self._in_memory + self._on_disk + len(self._unwritten)

    @property
    def _on_disk(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def full(self) -> bool:
        """No more until something is acknowledged, or the disk has room: until then the worker must wait."""
        return bool(self._unwritten) or self._on_disk >= self._limits[1]

    @property
    def waits_for_disk(self) -> bool:
        """It is full because the disk is: ``make_room`` may help at any time."""
        return bool(self._unwritten)

    def append(self, data: bytes) -> None:
        # Once something is on disk, what follows goes there too, so that the order is plain.
        if self._segments or self._unwritten or self._in_memory + len(data) > self._limits[0]:
            self._unwritten += data
            self.make_room()
        else:
            self._memory.append(data)
            self._in_memory += len(data)

    def make_room(self) -> None:
        """Write what the disk had no room for, as far as it has now; keep the rest."""
        try:
            while self._unwritten:
                segment = self._open_segment()
                room = self._limits[2] - segment.size
                self._write(segment, self._unwritten[:room])
        except OSError:
            pass  # full, or broken: either way nothing is lost, and it is tried again
        if self._segments and not self._segments[-1].size:
            self._segments.pop().path.unlink(missing_ok=True)

    def _open_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size >= self._limits[2]:
            self._made += 1
            self._segments.append(_Segment(Path(f"{self._path}.{self._made}")))
        return self._segments[-1]

    def _write(self, segment: _Segment, data: bytes) -> None:
        fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not appended: a write that failed half-way may have left something that doesn't count.
            written = os.pwrite(fd, data, segment.size)
        finally:
            os.close(fd)
        segment.size += written
        self._unwritten = self._unwritten[written:]

    def acknowledge(self, offset: int) -> None:
        """Everything before ``offset`` may be forgotten."""
        self.acknowledged = max(self.acknowledged, offset)
        while self._memory and self._base + len(self._memory[0]) <= self.acknowledged:
            gone = self._memory.popleft()
            self._base += len(gone)
            self._in_memory -= len(gone)
        while not self._memory and self._segments:
            first = self._segments[0]
            if self._base + first.size > self.acknowledged:
                break
            self._segments.popleft().path.unlink(missing_ok=True)
            self._base += first.size
        self._return_to_memory()
        self.make_room()

    def _return_to_memory(self) -> None:
        """What is left may fit into memory: then it needs no disk, which may be full."""
        if self._memory or not (self._segments or self._unwritten):
            return
        if self.end - self.acknowledged > self._limits[0]:
            return
        chunks = list(self.chunks())
        self.close()
        self._base, self._unwritten = self.acknowledged, b""
        self._memory.extend(data for _, data in chunks)
        self._in_memory = sum(len(data) for data in self._memory)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Everything from ``acknowledged`` on, with its offsets, in order."""
        offset = self._base
        for data in self._all():
            known = max(0, self.acknowledged - offset)
            if known < len(data):
                yield offset + known, data[known:]
            offset += len(data)

    def _all(self) -> Iterator[bytes]:
        yield from self._memory
        for segment in self._segments:
            with segment.path.open("rb") as file:
                left = segment.size
                while left and (data := file.read(min(left, 1 << 20))):
                    left -= len(data)
                    yield data
        if self._unwritten:
            yield self._unwritten

    def close(self) -> None:
        """Give the disk its space back."""
        while self._segments:
            self._segments.popleft().path.unlink(missing_ok=True)
