"""The state of a run, read back from its journal: for a driver that resumes it, and ``Result.from_path``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from everstep.checkpoint import ReportedCheckpointStatus
from everstep.config import CheckpointConfig
from everstep.control.checkpoints import Checkpoints
from everstep.control.commands import (
    GroupsStarting,
    GroupStarted,
    PhaseChanged,
    PreemptionSeen,
    RecoveryDecided,
    StragglerSeen,
)
from everstep.control.events import CheckpointRef, Notice
from everstep.control.failures import Budget, Failure, Kind
from everstep.driver import journal, records
from everstep.driver.ledger import RunLedger
from everstep.driver.positions import Positions
from everstep.engine.local.cluster import runtime_folder
from everstep.metrics import NO_METRICS, find_metric
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
        ref = self.ref
        metrics = msgspec.Raw(msgspec.msgpack.encode(self.metrics))
        return records.Committed(
            at,
            ref.folder,
            ref.epoch,
            ref.index,
            metrics,
            self.external,
            ref.group,
            ref.generation,
            ref.order,
            ref.state,
            self.validation,
        )


@dataclass
class History:
    """What a journal comes to. ``apply`` takes one record in."""

    lease: int = 0
    run_id: str = ""
    """Of the run, whoever drives it."""
    last_epoch: int = 0
    checkpoints: dict[str, KeptCheckpoint] = field(default_factory=dict)
    """In the order in which they were committed."""
    damaged: dict[str, KeptCheckpoint] = field(default_factory=dict)
    """Checkpoints that can't be restored; left for the user to look at."""
    deleted: set[str] = field(default_factory=set)
    """Folders that were given up. They may still be there."""
    let_go: dict[tuple[int, int, int], CheckpointRef] = field(default_factory=dict)
    """The newest that are gone, by (epoch, replica group, generation)."""
    reported: list[records.Metrics] = field(default_factory=list)
    """Rows of metrics, in the order in which they were recorded. It only grows: another thread may read."""
    numbers: list[int] = field(default_factory=list)
    """Where in training the first row of each of these stands."""
    owner: records.Owner | None = None
    """Who had it last."""
    outcome: str = ""
    """How it ended; empty if it did not."""
    message: str = ""
    value: bytes | None = None
    fingerprint: str = ""
    config: str = ""
    workers: tuple[int, int] = (0, 0)
    """The fewest and the most that were asked for."""
    ttl_s: float = 0.0
    """Silence of the owner after which its lease has lapsed."""
    opened: records.Opened | None = None
    """By which the run was last taken."""
    spent: dict[Budget, int] = field(default_factory=dict)
    """Of the budgets, since the run was last started (not taken over)."""
    notices: dict[str, Notice] = field(default_factory=dict)
    """Preemption notices that were not taken back, by slice; deadlines in UNIX time."""
    places: dict[int, records.Place] = field(default_factory=dict)
    """Where the workers of the last start were placed, by rank."""
    ledger: RunLedger = field(default_factory=RunLedger)
    """Where the time went."""
    stragglers: dict[tuple[int, ...], StragglerSeen] = field(default_factory=dict)
    """Who is slower than its peers, of the last attempt."""
    _generations: dict[tuple[int, int], int] = field(default_factory=dict)
    """The last incarnation of a replica group that was begun, by epoch and group; of a first, none."""
    _positions: Positions = field(default_factory=Positions)
    _wall_ahead: float = 0.0
    """From the clock of the driver that wrote a record to UNIX time."""
    _spent_before: dict[Budget, int] = field(default_factory=dict)

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
                self.lease, self.owner, self.ttl_s = record.lease, record.owner, record.ttl_s
                self.run_id = record.run_id or self.run_id or record.nonce
                self.opened = record
                self.outcome = ""
                self._wall_ahead = record.wall - record.at
                self.fingerprint, self.config = record.fingerprint, record.config
                self.workers = (record.workers_min, record.workers_max)
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
            case GroupStarted() | PhaseChanged():
                self.last_epoch = max(self.last_epoch, record.epoch)
            case StragglerSeen():
                self.stragglers = {k: one for k, one in self.stragglers.items() if one.epoch == record.epoch}
                self.stragglers.pop(record.ranks, None)
                if not record.over:
                    self.stragglers[record.ranks] = record
            case GroupsStarting():
                self._generations.update(((record.epoch, g), number) for g, number in record.generations)
            case RecoveryDecided():
                self.spent[record.budget] = record.spent
            case PreemptionSeen():
                self.notices.pop(record.slice, None)
                if record.deadline is not None:
                    deadline = record.deadline + self._wall_ahead
                    self.notices[record.slice] = Notice(record.slice, deadline, record.hosts)
            case _:
                pass

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
            incarnation = (kept.ref.epoch, kept.ref.group, kept.ref.generation)
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
        """The notices that stand, by a clock that UNIX time is so far ahead of."""
        return tuple(
            Notice(notice.slice, notice.deadline - wall_ahead, notice.hosts)
            for notice in self.notices.values()
        )

    def slow(self, epoch: int) -> list[StragglerSeen]:
        """Who is slower than its peers in this attempt."""
        return [one for one in self.stragglers.values() if one.epoch == epoch]

    def generations(self, epoch: int) -> dict[int, int]:
        """The last that were begun, by replica group, of those that were replaced in this epoch."""
        return {group: number for (of, group), number in self._generations.items() if of == epoch}

    @property
    def metrics(self) -> list[msgspec.Raw]:
        return [row for record in self.reported for row in record.rows]

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
        for (epoch, group), generation in self._generations.items():
            yield GroupsStarting(at, epoch, ((group, generation),))
        for kept in [*self.checkpoints.values(), *self.damaged.values()]:
            yield kept.as_record(at)
            if kept.validation and not kept.is_pending:
                yield records.Validated(at, kept.ref.folder, kept.status.value, NO_METRICS)
        for folder in self.damaged:
            yield records.Damaged(at, folder, "")
        for folder in sorted(self.deleted):
            yield records.Deleted(at, folder)
        for notice in self.notices.values():
            deadline = notice.deadline - self._wall_ahead
            yield PreemptionSeen(at, notice.slice, deadline, notice.hosts)
        for one in self.stragglers.values():
            yield msgspec.structs.replace(one, at=at)
        for budget, spent in self.spent.items():
            cause = Failure(Kind.EXCEPTION, at, "recorded in a part of the journal that was lost")
            yield RecoveryDecided(at, cause, budget, spent, 0, (), 0.0)

    def in_order(self) -> list[KeptCheckpoint]:
        """The checkpoints that there are, the oldest first, by the controller's rule: within an incarnation
        of a replica group as they were reported, between incarnations as they became complete. An upload in
        the background may end after that of a later report.
        """
        complete: dict[tuple[int, int, int], int] = {}
        found = []
        for kept in sorted(self.checkpoints.values(), key=lambda kept: kept.ref.index, reverse=True):
            ref = kept.ref
            incarnation = (ref.epoch, ref.group, ref.generation)
            # Not later than those that were reported after it.
            order = complete[incarnation] = min(ref.order, complete.get(incarnation, ref.order))
            found.append(((ref.epoch, order, ref.index), kept))
        return [kept for _, kept in sorted(found, key=lambda entry: entry[0])]

    def ranked(self, attribute: str | None, order: str) -> list[KeptCheckpoint]:
        """The best last, or the newest where nothing ranks them. Who has no score, or NaN, is worst."""
        sign = 1.0 if order == "max" else -1.0

        def worth(kept: KeptCheckpoint) -> float:
            score = find_metric(kept.metrics, attribute) if attribute is not None else None
            return -math.inf if score is None or math.isnan(score) else sign * score

        return sorted(self.in_order(), key=worth)

    @property
    def newest(self) -> KeptCheckpoint | None:
        """By the controller's own rule."""
        newest = Checkpoints(kept.ref for kept in self.checkpoints.values()).newest
        return self.checkpoints[newest.folder] if newest is not None else None


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
    except (TypeError, ValueError, OverflowError):
        return None


def to_delete(history: History, config: CheckpointConfig) -> list[str]:
    """The checkpoints that retention lets go of: all but the ``num_to_keep`` best, or newest where nothing
    ranks them. Never the newest, nor one that waits for its validation.
    """
    if config.num_to_keep is None:
        return []
    newest = history.newest
    ranked = history.ranked(config.checkpoint_score_attribute, config.checkpoint_score_order)
    worst = ranked[: -config.num_to_keep]
    return [kept.ref.folder for kept in worst if kept is not newest and not kept.is_pending]
