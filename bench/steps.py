"""When each rank made each step: written by the workers, read by whoever measures.

One file for each worker process; times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<dI")


class StepLog:
    """A worker's own file. A step is one small write, which outlives a kill right after it."""

    def __init__(self, folder: str, rank: int) -> None:
        path = Path(folder) / f"{rank}-{os.getpid()}-{time.monotonic_ns()}.steps"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def made(self, step: int) -> None:
        os.write(self._fd, _RECORD.pack(time.monotonic(), step))


@dataclass(frozen=True)
class Attempt:
    """A worker's life, as far as it got."""

    rank: int
    pid: int
    began: float
    path: Path

    def first(self) -> tuple[float, int] | None:
        """(when, which) its first step was, if it made one."""
        with self.path.open("rb") as file:
            head = file.read(_RECORD.size)
        return _RECORD.unpack(head) if len(head) == _RECORD.size else None

    def times(self) -> list[float]:
        """When its steps were."""
        data = self.path.read_bytes()
        return [when for when, _ in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])]

    def last(self) -> tuple[float, int] | None:
        data = self.path.read_bytes()
        whole = len(data) // _RECORD.size
        return _RECORD.unpack_from(data, (whole - 1) * _RECORD.size) if whole else None


def attempts_since(folder: Path, since: float) -> list[Attempt]:
    """Workers that began after ``since`` (monotonic seconds)."""
    found = []
    for name in os.listdir(folder):
        stem, dot, _ = name.partition(".steps")
        if dot:
            rank, pid, began = stem.split("-")
            if int(began) / 1e9 > since:
                found.append(Attempt(int(rank), int(pid), int(began) / 1e9, folder / name))
    return found


def newest_of_each_rank(attempts: Iterable[Attempt]) -> dict[int, Attempt]:
    newest: dict[int, Attempt] = {}
    for attempt in sorted(attempts, key=lambda a: a.began):
        newest[attempt.rank] = attempt
    return newest


def all_first_steps(attempts: Iterable[Attempt], workers: int) -> dict[int, tuple[float, int]] | None:
    """Each rank's first step in its newest attempt, once every rank has made one."""
    newest = newest_of_each_rank(attempts)
    if len(newest) < workers:
        return None
    firsts = {rank: attempt.first() for rank, attempt in newest.items()}
    return {rank: first for rank, first in firsts.items() if first} if all(firsts.values()) else None
