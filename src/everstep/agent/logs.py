"""Where a worker's output goes: a file that rotates, and its last lines, kept for errors."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from everstep.storage.folder import make_private

KEEP_LINES = 50
ROTATE_BYTES = 64 << 20
ROTATED_FILES = 3
_LINE = 4096


class WorkerLog:
    """One file per rank and attempt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=KEEP_LINES)
        self._rest = ""
        self._size = 0
        self._fd = self._open()

    def _open(self) -> int:
        make_private(Path(self.path).parent)
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        try:
            if self._size > ROTATE_BYTES:
                self._rotate()
            os.write(self._fd, data)
        except OSError:
            pass  # a full disk must not take the worker along: its last lines are still kept here
        self._size += len(data)
        lines = (self._rest + data.decode(errors="replace")).split("\n")
        self._rest = lines.pop()[-_LINE:]
        self._tail.extend(line[-_LINE:] for line in lines)

    def _rotate(self) -> None:
        for n in range(ROTATED_FILES - 1, 0, -1):
            older = Path(f"{self.path}.{n}")
            if older.exists():
                older.rename(f"{self.path}.{n + 1}")
        Path(self.path).rename(f"{self.path}.1")
        # Whatever fails here, the descriptor that we write to is one of ours.
        old, self._fd = self._fd, self._open()
        os.close(old)
        self._size = 0

    @property
    def tail(self) -> str:
        return "\n".join([*self._tail, *([self._rest] if self._rest else [])])

    def close(self) -> None:
        os.close(self._fd)


def last_lines(path: Path) -> str:
    """Of a file that a worker wrote itself; empty if it can't be read any more."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - KEEP_LINES * _LINE))
            lines = file.read(KEEP_LINES * _LINE).decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line[-_LINE:] for line in lines[-KEEP_LINES:])
