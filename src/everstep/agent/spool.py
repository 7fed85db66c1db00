"""What a worker has said and no driver has dealt with yet: kept in memory, then on disk, and never dropped.

A stream of bytes with offsets. The driver acknowledges an offset once what came before it is durable
elsewhere; a later driver gets everything from there on again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

IN_MEMORY = 8 << 20
ON_DISK = 1 << 30


class Spool:
    """The unacknowledged end of one worker's stream."""

    def __init__(self, path: Path, in_memory: int = IN_MEMORY, on_disk: int = ON_DISK) -> None:
        self._path = path
        self._limits = (in_memory, on_disk)
        self._memory: deque[bytes] = deque()
        self._in_memory = 0
        self._on_disk = 0
        self._base = 0
        self.acknowledged = 0
        """Nobody needs what came before this offset any more."""

    @property
    def end(self) -> int:
        return self._base + self._in_memory + self._on_disk

    @property
    def full(self) -> bool:
        """No more until something is acknowledged: whoever writes must wait."""
        return self._on_disk >= self._limits[1]

    def append(self, data: bytes) -> None:
        # Once something is on disk, what follows goes there too, so that the order is plain.
        if self._on_disk or self._in_memory + len(data) > self._limits[0]:
            with self._path.open("ab") as out:
                out.write(data)
            self._on_disk += len(data)
        else:
            self._memory.append(data)
            self._in_memory += len(data)

    def acknowledge(self, offset: int) -> None:
        """Everything before ``offset`` may be forgotten."""
        self.acknowledged = max(self.acknowledged, offset)
        while self._memory and self._base + len(self._memory[0]) <= offset:
            gone = self._memory.popleft()
            self._base += len(gone)
            self._in_memory -= len(gone)
        # The file goes as a whole: cutting its beginning off would cost more than keeping it for a while.
        if self._on_disk and not self._memory and offset >= self.end:
            self._base = offset
            self._on_disk = 0
            self._path.unlink(missing_ok=True)

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
        if self._on_disk:
            with self._path.open("rb") as file:
                while data := file.read(1 << 20):
                    yield data

    def close(self) -> None:
        if self._on_disk:
            self._path.unlink(missing_ok=True)
