"""What a run went through, one by one: failures that belong together, how it recovered, hangs, notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.control import commands as c
from everstep.failures import Failure, Kind
from everstep.journal import records
from everstep.observe.display import (
    describe,
    describe_straggler,
    phases_of,
    seconds_of,
    step_of,
    steps_lost,
    who_failed,
)
from everstep.observe.texts import Texts

STRAGGLER = "straggler"
PLANNED = "planned restart"
"""No failure: a change of the number of workers, of their places or of their code."""
MOST_FAILURES = 50
"""Of one incident that the page has: a slice of a thousand workers dies a thousand times."""


@dataclass
class ShownIncident:
    seen: float
    """When it was noticed."""
    kind: str
    text: str
    began: float
    """When it happened, as far as is known."""
    failures: list[Failure] = field(default_factory=list)
    more: int = 0
    """Failures that aren't among these."""
    groups: set[int] = field(default_factory=set)
    ranks: list[int] = field(default_factory=list)
    slice: str = ""
    cause: Failure | None = None
    stacks: str = ""
    """Where the stacks are, of a hang."""
    action: str = ""
    decided: c.RecoveryDecided | None = None
    recovered: c.Recovered | None = None
    until: float | None = None
    """When training went on."""
    note: str = ""

    def add(self, failure: Failure) -> None:
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(failure)
        else:
            self.more += 1
        if failure.rank is not None and failure.rank not in self.ranks and not failure.echo:
            self.ranks.append(failure.rank)


class Incidents:
    """``take`` takes one record in."""

    def __init__(self, unix_time: Callable[[float], float | None], groups_of: Callable[[Failure], set[int]]):
        self.all: list[ShownIncident] = []
        self._unix_time = unix_time
        self._groups_of = groups_of
        self._open: list[ShownIncident] = []
        """Failures that nothing has been decided about, and recoveries that haven't come to a step."""
        self._slow: dict[tuple[int, ...], ShownIncident] = {}
        """Who is slower than its peers."""

    def take(self, record: records.AnyRecord, when: float | None) -> None:
        if when is None:
            return
        match record:
            case c.FailureSeen():
                self._failed(record.failure, when)
            case c.HangSeen():
                self._hung(record, when)
            case records.StragglerSeen():
                self._straggled(record, when)
            case c.RecoveryDecided():
                self._decided(record, when)
            case c.Recovered():
                self._recovered(record, when)
            case c.PreemptionSeen():
                self._noticed(record, when)
            case c.HostSetAside():
                self.all.append(ShownIncident(when, "set aside", describe(record), when, until=when))
            case records.Damaged():
                text = f"{record.folder} can't be restored any more: {record.reason}"
                self.all.append(ShownIncident(when, "damaged", text, when, until=when))
            case c.GroupStarted() if not record.rung.is_partial:
                self._end_slow(when, "all workers restarted")
            case records.Closed():
                self._open = []
                self._end_slow(when, "the run ended")
            case records.Opened():
                self._open = []
            case _:
                pass

    # ------------------------------------------------------------------ failures

    def _failed(self, failure: Failure, when: float) -> None:
        groups = self._groups_of(failure)
        incident = next((i for i in self._undecided() if i.groups & groups or not groups), None)
        if incident is None:
            began = min(when, self._unix_time(failure.at) or when)
            incident = ShownIncident(when, failure.kind.value, _said(failure), began, groups=groups)
            self._begin(incident)
        incident.add(failure)
        incident.groups |= groups
        shown = incident.cause
        if shown is None or (shown.echo and not failure.echo):
            self._name_cause(incident, failure)

    def _name_cause(self, incident: ShownIncident, cause: Failure) -> None:
        incident.cause = cause
        incident.kind, incident.text = cause.kind.value, _said(cause)
        if cause.rank is not None:
            incident.ranks = [cause.rank, *(rank for rank in incident.ranks if rank != cause.rank)]

    def _hung(self, record: c.HangSeen, when: float) -> None:
        if record.action == "warn":
            incident = ShownIncident(when, Kind.HANG.value, record.message, when, until=when)
            self.all.append(incident)
        else:
            # The failure that follows is what it is decided about.
            incident = ShownIncident(when, Kind.HANG.value, record.message, when)
            self._begin(incident)
            groups = [self._groups_of(Failure(Kind.HANG, record.at, "", rank=rank)) for rank in record.ranks]
            incident.groups = {*()}.union(*groups)
        incident.ranks = [*record.ranks]
        incident.stacks, incident.action = record.stacks, record.action

    def _straggled(self, record: records.StragglerSeen, when: float) -> None:
        incident = self._slow.pop(record.ranks, None)
        if not record.over:
            incident = ShownIncident(when, STRAGGLER, describe_straggler(record), when, ranks=[*record.ranks])
            self._slow[record.ranks] = incident
            self.all.append(incident)
        elif incident is not None:
            incident.until, incident.note = when, f"over: it {record.over}"

    def _end_slow(self, when: float, why: str) -> None:
        for incident in self._slow.values():
            incident.until, incident.note = when, f"over: {why}"
        self._slow = {}

    def _decided(self, record: c.RecoveryDecided, when: float) -> None:
        concerned = {*record.groups}
        found = [i for i in self._undecided() if not concerned or i.groups & concerned or not i.groups]
        if not found:
            found = [ShownIncident(when, record.cause.kind.value, _said(record.cause), when)]
            self._begin(found[0])
        first, *others = found
        for other in others:  # two that became one
            for failure in other.failures:
                first.add(failure)
            first.more += other.more
            self.all.remove(other)
            self._open.remove(other)
        self._name_cause(first, record.cause)
        first.began = min(first.began, self._unix_time(record.cause.at) or first.began)
        first.decided = record
        first.groups = concerned or first.groups

    def _recovered(self, record: c.Recovered, when: float) -> None:
        if record.cause is None:
            began, text = when - record.total_s, step_of(record)
            self.all.append(ShownIncident(began, PLANNED, text, began, recovered=record, until=when))
            return
        partial = record.rung.is_partial
        found = [i for i in self._open if i.decided is not None and (not partial or _same(i, record.cause))]
        last = next((i for i in reversed(found) if _same(i, record.cause)), None)
        unseen_s = record.total_s - seconds_of(record)  # it trained, and reported nothing
        for incident in found:
            incident.until = when - unseen_s
            if incident is last:
                incident.recovered = record
                incident.began = min(incident.began, when - record.total_s)
            else:
                incident.note = "another failure came before training went on; that one's recovery ended both"
            self._open.remove(incident)

    def _noticed(self, record: c.PreemptionSeen, when: float) -> None:
        kind, text = "preemption notice", describe(record)
        self.all.append(ShownIncident(when, kind, text, when, slice=record.slice, until=when))

    def _undecided(self) -> list[ShownIncident]:
        return [incident for incident in self._open if incident.decided is None]

    def _begin(self, incident: ShownIncident) -> None:
        self.all.append(incident)
        self._open.append(incident)

    # ------------------------------------------------------------------ as JSON

    def as_plain(self, texts: Texts, stacks: Callable[[str], str]) -> list[dict[str, Any]]:
        hangs = [incident.stacks for incident in self.all if incident.stacks]
        read = {path: stacks(path) for path in hangs[-MOST_STACKS:]}
        return [_plain(incident, texts, read) for incident in sorted(self.all, key=lambda i: i.began)]


MOST_STACKS = 200
"""Files of stacks that are read for a page, the newest."""


def _plain(incident: ShownIncident, texts: Texts, stacks: dict[str, str]) -> dict[str, Any]:
    cause = incident.cause
    found: dict[str, Any] = {
        "began": incident.began,
        "seen": incident.seen,
        "until": incident.until,
        "kind": incident.kind,
        "text": texts.number(incident.text),
        "ranks": incident.ranks[:MOST_FAILURES],
    }
    if incident.slice:
        found["slice"] = incident.slice
    if incident.note:
        found["note"] = incident.note
    if cause is not None:
        found["cause"] = _failure(cause, texts)
    others = [failure for failure in incident.failures if failure != cause]
    if others:
        found["others"] = [_failure(failure, texts) for failure in others]
    if incident.more:
        found["more"] = incident.more
    if incident.stacks:
        found["stacks"] = incident.stacks
        found["stacks_text"] = texts.number(stacks.get(incident.stacks, ""))
        found["action"] = incident.action
    if (decided := incident.decided) is not None:
        found["budget"] = [decided.budget, decided.spent, decided.limit, decided.pause_s]
    if (recovered := incident.recovered) is not None:
        found["recovery"] = {
            "rung": step_of(recovered),
            "attempt": recovered.epoch,
            "kept": texts.number(recovered.kept),
            "from": texts.number(recovered.state_from),
            "steps_lost": steps_lost(recovered),
            "seconds": seconds_of(recovered),
            "phases": [[name, seconds] for name, seconds in phases_of(recovered)],
        }
    return found


def _failure(failure: Failure, texts: Texts) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": failure.kind.value, "text": texts.number(failure.message)}
    optional: Sequence[tuple[str, Any]] = (
        ("rank", failure.rank),
        ("host", failure.host),
        ("echo", failure.echo or None),
        ("exit", failure.exit_code),
        ("signal", failure.signal),
        ("traceback", texts.number(failure.traceback) or None),
        ("log", texts.number(failure.log_tail) or None),
        ("log_path", failure.log_path or None),
    )
    return found | {name: value for name, value in optional if value is not None}


def _said(failure: Failure) -> str:
    who = who_failed(failure)
    return f"{who}: {failure.message}" if who else failure.message


def _same(incident: ShownIncident, cause: Failure) -> bool:
    shown = incident.cause
    return shown is not None and (shown.kind, shown.rank, shown.host) == (cause.kind, cause.rank, cause.host)
