"""The state of a run, read back from its journal: for a driver that resumes it, and ``Result.from_path``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from everstep.checkpoint import ReportedCheckpointStatus
from everstep.control.budgets import Budget
from everstep.control.commands import (
    GroupsStarting,
    GroupStarted,
    PhaseChanged,
    PreemptionSeen,
    RecoveryDecided,
)
from everstep.control.events import Notice
from everstep.engine.local.cluster import runtime_folder
from everstep.failures import Failure, Kind
from everstep.identity import Incarnation
from everstep.journal import journal, records
from everstep.journal.ledger import RunLedger
from everstep.journal.positions import Positions
from everstep.protocol.metrics import NO_METRICS, find_metric
from everstep.saved.checkpoints import CheckpointRef, in_order
from everstep.saved.retention import Scored, ranked
from everstep.storage.asynchronous import AsyncStore
from everstep.storage.store import Store
from everstep.topology.placement import Assignment


@dataclass
class KeptCheckpoint:
    """A committed checkpoint that retention has not removed."""

    ref: CheckpointRef
    metrics: dict[str, Any]
    external: str | None
    validation: bytes = b""
    """How it is to be validated; empty: it isn't."""
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED

    @property
    def is_pending(self) -> bool:
        return self.status is ReportedCheckpointStatus.PENDING_VALIDATION

    def address(self, run: Store | AsyncStore) -> str:
        return self.external or run.address(self.ref.folder)

    def as_record(self, at: float) -> records.Committed:
        metrics = msgspec.Raw(msgspec.msgpack.encode(self.metrics))
        return records.Committed.of(at, self.ref, metrics, self.external, self.validation)


class RecordedNotice(NamedTuple):
    """A notice, as the driver that received it wrote it down."""

    notice: Notice
    """Its deadline by that driver's monotonic clock."""
    heard_by: records.Opened

    def by(self, clock: tuple[str, ...], wall_ahead: float) -> Notice:
        """By another clock, which UNIX time is so far ahead of. UNIX time may have been set in between: it
        counts only where the two have no clock in common.
        """
        opened = self.heard_by
        if clock and clock == opened.owner.clock:
            return self.notice
        deadline = self.notice.deadline + (opened.wall - opened.at) - wall_ahead
        return msgspec.structs.replace(self.notice, deadline=deadline)


@dataclass
class History:
    """What a journal comes to. ``apply`` takes one record in."""

    run_id: str = ""
    """Of the run, whoever drives it."""
    last_epoch: int = 0
    checkpoints: dict[str, KeptCheckpoint] = field(default_factory=dict)
    """In the order in which they were committed."""
    damaged: dict[str, KeptCheckpoint] = field(default_factory=dict)
    """Checkpoints that can't be restored; left for the user to look at."""
    deleted: set[str] = field(default_factory=set)
    """Folders that were given up. They may still be there."""
    let_go: dict[Incarnation, CheckpointRef] = field(default_factory=dict)
    """The newest that are gone."""
    reported: list[records.Metrics] = field(default_factory=list)
    """Rows of metrics, in the order in which they were recorded. It only grows: another thread may read."""
    numbers: list[int] = field(default_factory=list)
    """Where in training the first row of each of these stands."""
    outcome: str = ""
    """How it ended; empty if it did not."""
    message: str = ""
    value: bytes | None = None
    opened: records.Opened | None = None
    """By which the run was last taken."""
    spent: dict[Budget, int] = field(default_factory=dict)
    """Of the budgets, since the run was last started (not taken over)."""
    notices: dict[str, RecordedNotice] = field(default_factory=dict)
    """Preemption notices that were not taken back, by slice."""
    places: dict[int, records.Place] = field(default_factory=dict)
    """Where the workers of the last start were placed, by rank; nowhere, once the run has ended."""
    ledger: RunLedger = field(default_factory=RunLedger)
    """Where the time went."""
    stragglers: dict[tuple[int, ...], records.StragglerSeen] = field(default_factory=dict)
    """Who is slower than its peers, of the last attempt."""
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last incarnation of a replica group that was begun, by epoch and group; of a first, none."""
    _positions: Positions = field(default_factory=Positions)
    _spent_before: dict[Budget, int] = field(default_factory=dict)

    @property
    def lease(self) -> int:
        return self.opened.lease if self.opened is not None else 0

    @property
    def owner(self) -> records.Owner | None:
        """The driver that had it last."""
        return self.opened.owner if self.opened is not None else None

    @property
    def ttl_s(self) -> float:
        """Silence of the owner after which its lease has lapsed."""
        return self.opened.ttl_s if self.opened is not None else 0.0

    @property
    def config(self) -> str:
        return self.opened.config if self.opened is not None else ""

    @classmethod
    def of(cls, read: Iterable[records.AnyRecord]) -> History:
        history = cls()
        for record in read:
            history.apply(record)
        return history

    def apply(self, record: records.AnyRecord) -> None:
        """Take one record in. The driver does the same with what it writes: there is one way to the truth."""
        self.ledger.apply(record)
        number = self._positions.take(record)
        match record:
            case records.Opened():
                self.run_id = record.run_id or self.run_id or record.nonce
                self.opened = record
                self.outcome = ""
                self.spent, self._spent_before = {}, self.spent
            case records.TakenOver():
                self.spent = self._spent_before
            case records.Placed():
                self.places.update((place.rank, place) for place in record.places)
                for rank in record.gone:
                    self.places.pop(rank, None)
            case records.Committed():
                ref = CheckpointRef(
                    record.folder,
                    record.epoch,
                    record.index,
                    record.group,
                    record.generation,
                    record.order,
                    record.state,
                )
                status = ReportedCheckpointStatus
                self.checkpoints[record.folder] = KeptCheckpoint(
                    ref,
                    msgspec.msgpack.decode(record.metrics),
                    record.external,
                    record.validation,
                    status.PENDING_VALIDATION if record.validation else status.COMMITTED,
                )
                self.damaged.pop(record.folder, None)
                self.last_epoch = max(self.last_epoch, record.epoch)
            case records.Validated():
                self._validated(record)
            case records.Deleted():
                self._let_go(record.folder)
                self.damaged.pop(record.folder, None)
                self.deleted.add(record.folder)
            case records.Damaged():
                kept = self._let_go(record.folder)
                if kept is not None:
                    self.damaged[record.folder] = kept
            case records.Metrics():
                self.numbers.append(number)
                self.reported.append(record)
                self.last_epoch = max(self.last_epoch, record.epoch)
            case records.Closed():
                self.outcome, self.message, self.value = record.outcome, record.message, record.value
                self.places.clear()
            case GroupStarted() | PhaseChanged():
                self.last_epoch = max(self.last_epoch, record.epoch)
            case records.StragglerSeen():
                self.stragglers = {k: one for k, one in self.stragglers.items() if one.epoch == record.epoch}
                self.stragglers.pop(record.ranks, None)
                if not record.over:
                    self.stragglers[record.ranks] = record
            case GroupsStarting():
                self.begun.update(((record.epoch, g), number) for g, number in record.generations)
            case RecoveryDecided():
                self.spent[record.budget] = record.spent
            case PreemptionSeen():
                self.notices.pop(record.slice, None)
                if record.deadline is not None and self.opened is not None:
                    notice = Notice(record.slice, record.deadline, record.hosts)
                    self.notices[record.slice] = RecordedNotice(notice, self.opened)
            case _:
                pass

    def add_begun(self, begun: Iterable[Incarnation]) -> None:
        """No number is used twice, also if the record of its start is lost."""
        for epoch, group, generation in begun:
            self.last_epoch = max(self.last_epoch, epoch)
            if generation > self.begun.get((epoch, group), 0):
                self.begun[epoch, group] = generation

    def placed(
        self, at: float, assignments: Iterable[Assignment], others_stay: bool
    ) -> records.Placed | None:
        """What is new about where workers run, if anything is."""
        places = {a.rank: records.Place(a.rank, a.host, a.slice, a.group_id) for a in assignments}
        new = [place for rank, place in places.items() if self.places.get(rank) != place]
        gone = [] if others_stay else [rank for rank in self.places if rank not in places]
        return records.Placed(at, new, gone) if new or gone else None

    def _validated(self, record: records.Validated) -> None:
        kept = self.checkpoints.get(record.folder) or self.damaged.get(record.folder)
        if kept is not None:
            kept.status = ReportedCheckpointStatus(record.status)
            kept.metrics = {**kept.metrics, **msgspec.msgpack.decode(record.metrics)}

    def pending(self) -> list[KeptCheckpoint]:
        """Those that wait for their validation, the oldest first."""
        return [kept for kept in self.in_order() if kept.is_pending]

    def _let_go(self, folder: str) -> KeptCheckpoint | None:
        kept = self.checkpoints.pop(folder, None)
        if kept is not None:
            incarnation = Incarnation(kept.ref.epoch, kept.ref.group, kept.ref.generation)
            before = self.let_go.get(incarnation)
            if before is None or before.index < kept.ref.index:
                self.let_go[incarnation] = kept.ref
        return kept

    def forget(self, folder: str) -> None:
        """A checkpoint isn't there, and nothing says why. No record does either: whoever finds its manifest
        takes it in.
        """
        self._let_go(folder)

    def notices_by(self, wall_ahead: float) -> tuple[Notice, ...]:
        """The notices that stand, by the clock of who has taken the run, which UNIX time is so far ahead
        of.
        """
        clock = self.opened.owner.clock if self.opened is not None else ()
        return tuple(notice.by(clock, wall_ahead) for notice in self.notices.values())

    def slow(self, epoch: int) -> list[records.StragglerSeen]:
        """Workers that are slower than their peers in this attempt."""
        return [one for one in self.stragglers.values() if one.epoch == epoch]

    @property
    def metrics(self) -> list[msgspec.Raw]:
        return [row for record in self.reported for row in record.rows]

    def reports_by_attempt(self) -> dict[int, int]:
        """How many rows of metrics each has."""
        found: Counter[int] = Counter()
        for record in self.reported:
            found[record.epoch] += len(record.rows)
        return dict(found)

    def reports(self, epoch: int) -> dict[tuple[int, int], dict[int, msgspec.Raw]]:
        """An epoch's reports by (replica group, generation) and index."""
        found: dict[tuple[int, int], dict[int, msgspec.Raw]] = {}
        for record in self.reported:
            if record.epoch != epoch:
                continue
            rows = found.setdefault((record.group, record.generation), {})
            rows.update(enumerate(record.rows, record.first))
        return found

    def as_records(self) -> Iterator[records.AnyRecord]:
        """Records that come to the same history, for a journal that has lost some: its new beginning."""
        if self.opened is None:
            return
        yield self.opened
        yield PhaseChanged(self.opened.at, "", self.last_epoch)
        at = self.opened.at
        if self.places:
            yield records.Placed(at, [*self.places.values()], [])
        for rows, number in zip(self.reported, self.numbers, strict=True):
            yield msgspec.structs.replace(rows, number=number)
        for (epoch, group), generation in self.begun.items():
            yield GroupsStarting(at, epoch, ((group, generation),))
        for kept in [*self.checkpoints.values(), *self.damaged.values()]:
            yield kept.as_record(at)
            if kept.validation and not kept.is_pending:
                yield records.Validated(at, kept.ref.folder, kept.status.value, NO_METRICS)
        for folder in self.damaged:
            yield records.Damaged(at, folder, "")
        for folder in sorted(self.deleted):
            yield records.Deleted(at, folder)
        for notice in self.notices_by(self.opened.wall - at):
            yield PreemptionSeen(at, notice.slice, notice.deadline, notice.hosts)
        for one in self.stragglers.values():
            yield msgspec.structs.replace(one, at=at)
        for budget, spent in self.spent.items():
            cause = Failure(Kind.EXCEPTION, at, "recorded in a part of the journal that was lost")
            yield RecoveryDecided(at, cause, budget, spent, 0, (), 0.0)

    def in_order(self) -> list[KeptCheckpoint]:
        """The checkpoints that there are, the oldest first, by the controller's rule."""
        refs = in_order((kept.ref for kept in self.checkpoints.values()), self.let_go.values())
        return [self.checkpoints[ref.folder] for ref in refs]

    def scored(self, attribute: str | None) -> list[Scored]:
        """The checkpoints that there are, with their scores: the metric of this name."""
        return [
            Scored(
                kept.ref,
                find_metric(kept.metrics, attribute) if attribute is not None else None,
                kept.is_pending,
            )
            for kept in self.checkpoints.values()
        ]

    def ranked(self, attribute: str | None, order: str) -> list[KeptCheckpoint]:
        """The best last, or the newest where nothing ranks them."""
        best_last = ranked(self.scored(attribute), self.let_go.values(), order)
        return [self.checkpoints[one.ref.folder] for one in best_last]

    @property
    def newest(self) -> KeptCheckpoint | None:
        """By the controller's own rule."""
        kept = self.in_order()
        return kept[-1] if kept else None


def read_history(run: Store) -> History:
    return History.of(journal.read(run))


def log_folder(run: Store) -> Path:
    """Where workers' logs are written: in the run, or on this machine if that isn't a folder."""
    if run.is_local:
        return Path(run.address()) / "logs"
    return runtime_folder() / "logs" / hashlib.sha256(run.address().encode()).hexdigest()[:24]


def plain_value(value: Any) -> bytes | None:
    """A return value as the journal keeps it: numbers, text, lists and dicts. Anything else isn't kept:
    storage holds no pickles.
    """
    if value is None:
        return None
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
