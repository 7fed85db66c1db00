"""What can go wrong with workers and hosts, in the terms of all parts of Everstep, and which of several
failures was the cause.
"""

from __future__ import annotations

import enum
import re

import msgspec

from everstep.topology.slices import HostId

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


class Kind(enum.StrEnum):
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "out of memory"
    HANG = "hang"
    HOST_LOST = "host lost"
    HOST_SILENT = "host silent"
    START = "start failed"
    TEMPLATE = "template died"
    RESERVATION = "reservation failed"
    PREEMPTED = "preempted"
    LOAD = "function can't be loaded"
    STORAGE = "storage can't be used"
    LIMIT = "limit exceeded"
    CONFLICT = "files that can't all be kept"


class Failure(msgspec.Struct, frozen=True):
    """One thing that went wrong, with all that the user needs to know of it."""

    kind: Kind
    at: float
    """When it happened, as far as is known; before it was noticed."""
    message: str
    """One line: the exception, the signal by name, why the host counts as lost."""
    rank: int | None = None
    host: HostId | None = None
    echo: bool = False
    """It looks like the consequence of another rank's failure (a collective that broke)."""
    exit_code: int | None = None
    signal: str | None = None
    traceback: str = ""
    log_tail: str = ""
    log_path: str = ""

    @property
    def way(self) -> str:
        """The same for failures that differ only in numbers: ports, pids, addresses, ranks."""
        return _NUMBER.sub("#", self.message)

    @property
    def line(self) -> str:
        """Who, and what."""
        if self.rank is not None:
            return f"rank {self.rank}: {self.message}"
        return f"host {self.host}: {self.message}" if self.host else self.message

    def preempted(self) -> Failure:
        """The same, as the consequence of a preemption."""
        return msgspec.structs.replace(self, kind=Kind.PREEMPTED)

    def while_starting(self) -> Failure:
        """Any failure before training begins is a failed start."""
        if self.kind in (Kind.START, Kind.RESERVATION, Kind.PREEMPTED, Kind.LIMIT):
            return self
        message = f"{self.kind.value} before training began: {self.message}"
        return msgspec.structs.replace(self, kind=Kind.START, message=message)


# What explains the failures of others: a host that is gone, or a template that took its workers along, is
# why the peers' connections broke. Lower explains more.
_EXPLAINS = {
    Kind.LOAD: 0,
    Kind.PREEMPTED: 1,
    Kind.HOST_LOST: 2,
    Kind.HOST_SILENT: 2,
    Kind.TEMPLATE: 3,
}

_OF_A_HOST = frozenset({Kind.HOST_LOST, Kind.HOST_SILENT, Kind.PREEMPTED})

# A host's loss explains what others saw only if it happened before that, or about then. A host that is lost
# while its workers are being ended does not hide the exception that they are ended for.
_CLOSE_S = 1.0


class Incident:
    """Failures that belong together: everything from the first until the workers concerned are gone."""

    def __init__(self, first: Failure, seen: float) -> None:
        self.failures = [first]
        self.seen = seen
        self.charged = False

    def add(self, failure: Failure) -> None:
        self.failures.append(failure)

    def date(self, host: HostId, at: float) -> None:
        """A host of this incident was lost at that time: so far it was only known to be missing."""
        self.failures = [
            msgspec.structs.replace(f, at=min(f.at, at)) if f.host == host and f.kind in _OF_A_HOST else f
            for f in self.failures
        ]

    @property
    def cause(self) -> Failure:
        """The first cause: what explains the others, else what isn't an echo, else the earliest."""
        first = min(self.failures, key=lambda f: (f.echo, f.at))
        explaining = [
            f
            for f in self.failures
            if f.kind in _EXPLAINS and (first.echo or f.kind is Kind.LOAD or f.at <= first.at + _CLOSE_S)
        ]
        return min(explaining, key=lambda f: (_EXPLAINS[f.kind], f.at), default=first)


class FirstStarts:
    """Counts starts in a row that failed in the same way, before the run ever trained: more of them won't
    help.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.over = False
        """Workers of this run have got to train, so that the function can be loaded."""
        self._way = ""
        self._in_a_row = 0

    def failed(self, cause: Failure) -> bool:
        """One more. True if it was the last that is worth trying."""
        self._in_a_row = self._in_a_row + 1 if cause.way == self._way else 1
        self._way = cause.way
        return not self.over and self._in_a_row >= self.limit
