"""What can go wrong, what each failure costs, and which of several was the cause."""

from __future__ import annotations

import enum
import re

import msgspec

from everstep.topology.slices import HostId


class Budget(enum.StrEnum):
    """Each budget is spent by its own causes only."""

    FAILURES = "max_failures"
    STARTUP = "controller_failure_limit"
    PREEMPTION = "max_preemption_failures"
    REPLICAS = "max_replica_failures"


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


BUDGET_OF: dict[Kind, Budget | None] = {
    Kind.EXCEPTION: Budget.FAILURES,
    Kind.EXIT: Budget.FAILURES,
    Kind.SIGNAL: Budget.FAILURES,
    Kind.OOM: Budget.FAILURES,
    Kind.HANG: Budget.FAILURES,
    Kind.HOST_LOST: Budget.FAILURES,
    Kind.HOST_SILENT: Budget.FAILURES,
    Kind.TEMPLATE: Budget.FAILURES,
    Kind.START: Budget.STARTUP,
    Kind.RESERVATION: Budget.STARTUP,
    Kind.PREEMPTED: Budget.PREEMPTION,
    Kind.LOAD: None,
    Kind.STORAGE: None,
    Kind.LIMIT: None,
    Kind.CONFLICT: None,
}
"""Which budget a cause spends. ``None``: it is never retried."""

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

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


class Failure(msgspec.Struct, frozen=True):
    """One thing that went wrong, with what is needed to tell the user."""

    kind: Kind
    at: float
    """When it happened, as far as is known; before it was noticed."""
    message: str
    """One line: the exception, the signal by name, why the host counts as lost."""
    rank: int | None = None
    host: HostId | None = None
    echo: bool = False
    """It looks like the consequence of somebody else's failure (a collective that broke)."""
    exit_code: int | None = None
    signal: str | None = None
    traceback: str = ""
    log_tail: str = ""
    log_path: str = ""

    @property
    def way(self) -> str:
        """The same for failures that differ only in numbers: ports, pids, addresses, ranks."""
        return _NUMBER.sub("#", self.message)


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

    @property
    def is_echo(self) -> bool:
        return all(failure.echo for failure in self.failures)
