"""A run's ledger, from its journal: the same for a live view, a result, and a run that is read later.

What a stretch of time was is often known only afterwards: that steps were lost, when a failure had happened,
that workers trained on while no driver was there. So what was charged is charged again, in whole, when a
record tells.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from everstep.control import commands as c
from everstep.failures import Kind
from everstep.goodput import Category, Ledger, LedgerOverTime
from everstep.identity import Incarnation
from everstep.journal import records

_ABSENT = -1
"""The workers that are wanted, and that there is no place for."""
_REWRITABLE = 256
"""How many of the newest stretches may still change their category."""
_REWRITABLE_EACH = 8
"""How many more for each replica group."""
_TRAINING = (Category.STEP, Category.REDO)


class _Stretch(msgspec.Struct):
    """Workers of one replica group, for some time."""

    group: int
    category: Category
    workers: float
    since: float
    until: float = math.inf
    """Infinite: it goes on."""
    stalled: float = 0.0
    """Seconds of it in which training stood still for a checkpoint."""

    def charge(self, ledger: Ledger, now: float) -> None:
        until = min(self.until, now)
        stalled = min(self.stalled, max(0.0, until - self.since))
        ledger.charge(self.category, self.workers, self.since, until - stalled)
        ledger.charge(Category.CHECKPOINT, self.workers, until - stalled, until)

    def pieces(self, first: float, last: float, category: Category) -> list[_Stretch]:
        """The same, with another category from ``first`` to ``last``. Stalls stay what they were where steps
        turn out to be done again.
        """
        found = []
        for kind, since, until in (
            (self.category, self.since, first),
            (category, first, last),
            (self.category, last, self.until),
        ):
            if until > since:
                share = (until - since) / (self.until - self.since) if kind in _TRAINING else 0.0
                piece = _Stretch(self.group, kind, self.workers, since, until, share * self.stalled)
                found.append(piece)
        return found


class _Start(msgspec.Struct):
    """A start of workers."""

    epoch: int = 0
    since: float = 0.0
    groups: frozenset[int] = frozenset()
    """The replica groups, if not all."""
    restored: str = ""
    """The checkpoint that it went back to; with ``from_memory`` it did not."""
    from_memory: bool = False
    cause: tuple[float, Category] | None = None
    """When the failure happened that it recovers from, and what the time was until that was noticed. None: it
    recovers from nothing, or has recovered.
    """


class RunLedger:
    """``apply`` takes one record in; ``until`` is what that comes to, also for another thread."""

    def __init__(self) -> None:
        self._settled = LedgerOverTime()
        self._stretches: list[_Stretch] = []
        self._open: dict[int, _Stretch] = {}
        """What each replica group does."""
        self._wanted = 0
        self._offset = 0.0
        self._now: float | None = None
        self._closed = True
        self._away: dict[int, tuple[float, float]] = {}
        """When a driver was lost and the next came, by the replica groups that trained."""
        self._start = _Start()
        """The last one."""
        self._cause: tuple[float, Category] | None = None
        """Of the next one."""
        self._reports = False
        """The training function does: so workers that have not reported have not trained."""
        self._committed: dict[str, float] = {}
        self._unvalidated: set[str] = set()
        """Checkpoints that wait for their validation."""
        self._hung: float | None = None
        """Since when the workers hang, if a hang was found and nothing has recovered from it."""
        self.stalls_upto: dict[Incarnation, int] = {}
        """Of the last attempt, by (attempt, replica group, generation): the newest report whose stalls are in
        here.
        """

    # ------------------------------------------------------------------ taking records in

    def apply(self, record: records.AnyRecord) -> None:
        if isinstance(record, records.Opened):
            self._offset = record.wall - record.at
        if isinstance(record, (records.Metrics, records.Committed)):
            self._reported(record.epoch)
        at = getattr(record, "at", None)
        if at is None:
            return
        # Clocks of two drivers may differ: time doesn't run backwards for that.
        before = self._now
        now = self._now = max(at + self._offset, self._now if self._now is not None else at + self._offset)
        match record:
            case records.Opened():
                self._opened(record, before, now)
            case records.TakenOver():
                self._taken_over(now)
            case records.Committed():
                self._committed[record.folder] = now
                self._unvalidated |= {record.folder} if record.validation else set()
                self._cut(now)
            case records.Validated() | records.Damaged():
                self._settle_validation(record.folder, now)
            case records.Stalled():
                self._stalled(record, record.at + self._offset)
            case records.Deleted():
                self._committed.pop(record.folder, None)
                self._settle_validation(record.folder, now)
            case records.Closed():
                self._end_hung(now)
                self._recount_failed_start(now)
                self._each(Category.RESTART, now)
                self._closed = True
            case c.FailureSeen() if record.failure.kind is Kind.HANG:
                self._hung = record.failure.at + self._offset
            case c.PhaseChanged():
                self._phase(record.phase, now)
            case c.RecoveryDecided():
                if not record.groups:
                    noticed = Category.HANG if record.cause.kind is Kind.HANG else Category.DETECT
                    self._cause = record.cause.at + self._offset, noticed
                for group in record.groups:  # until it trains again, and what it was is known
                    self._turn(group, Category.WAITING, now)
            case c.GroupStarted():
                self._group_started(record, now)
            case c.Recovered():
                self._recovered(record, now)
            case _:
                pass

    def until(self, at: float | None = None) -> Ledger:
        """Up to this time by the clock of the driver that wrote last, or up to its last record. A run that
        has ended goes on no longer.
        """
        ledger = Ledger()
        ledger.total.update(self._settled.total)
        self._charge_rest(ledger, self._now if at is None or self._closed else at + self._offset)
        return ledger

    def over_time(self) -> LedgerOverTime:
        """Up to the last record, in UNIX time."""
        ledger = self._settled.copy()
        self._charge_rest(ledger, self._now)
        return ledger

    def _charge_rest(self, ledger: Ledger, now: float | None) -> None:
        for stretch in [*self._stretches, *self._open.values()]:
            stretch.charge(ledger, now if now is not None else stretch.since)

    # ------------------------------------------------------------------ what records say

    def _opened(self, record: records.Opened, before: float | None, now: float) -> None:
        self._start.cause = self._cause = None
        self._wanted = max(1, record.workers_max)  # without workers, this process trains
        if self._closed or before is None:
            self._closed = False
            self._turn_all({}, before if before is not None else now)  # what is between isn't the run's
            self._turn_all({0: (Category.RESTART, float(self._wanted))}, now)
            return
        self._away = {
            group: (before, now)
            for group, stretch in self._open.items()
            if stretch.category is Category.STEP and group != _ABSENT
        }
        self._each(Category.AWAY, before)
        present = {
            group: (Category.RESTART, s.workers) for group, s in self._open.items() if group != _ABSENT
        }
        missing = max(0.0, self._wanted - sum(workers for _, workers in present.values()))
        self._turn_all({**present, _ABSENT: (Category.RESTART, missing)}, now)

    def _taken_over(self, now: float) -> None:
        """Workers trained on while nobody drove."""
        for group, (since, _) in self._away.items():
            self._turn(group, Category.STEP, now)
            self._rewrite({group}, since, now, Category.STEP)
        self._away = {}

    def _phase(self, phase: str, now: float) -> None:
        match phase:
            case "waiting":
                self._each(Category.WAITING, now)
            case "running":
                self._each(Category.STEP, now)
                self._turn(_ABSENT, Category.WAITING, now)
            case "ended" if self._unvalidated:
                self._each(Category.VALIDATION, now)
            case _:
                self._each(Category.RESTART, now)

    def _end_hung(self, now: float) -> None:
        """A hang that ended the run: no recovery tells how long it was. Other replica groups trained."""
        if self._hung is not None and len(self._open.keys() - {_ABSENT}) == 1:
            self._rewrite(None, self._hung, now, Category.HANG, only=Category.STEP)
        self._hung = None

    def _settle_validation(self, folder: str, now: float) -> None:
        self._unvalidated.discard(folder)
        if not self._unvalidated and any(s.category is Category.VALIDATION for s in self._open.values()):
            self._each(Category.RESTART, now)

    def _group_started(self, record: c.GroupStarted, now: float) -> None:
        groups = frozenset(group for group, _ in record.generations)
        self._hung = None
        partial = record.rung.is_partial
        if not partial:
            self._recount_failed_start(now)
        self._start = _Start(
            record.epoch,
            now,
            groups if partial else frozenset(),
            record.checkpoint or "",
            record.from_memory,
            None if partial else self._cause,
        )
        self._cause = None
        self.stalls_upto = {of: upto for of, upto in self.stalls_upto.items() if of.epoch == record.epoch}
        others = {
            group: (stretch.category, stretch.workers)
            for group, stretch in self._open.items()
            if partial and group not in {*groups, _ABSENT}
        }
        size = (record.world_size - sum(workers for _, workers in others.values())) / max(1, len(groups))
        every = {**others, **dict.fromkeys(groups, (Category.STEP, size))}
        every[_ABSENT] = (Category.WAITING, max(0.0, self._wanted - record.world_size))
        self._turn_all(every, now)

    def _reported(self, epoch: int) -> None:
        self._reports = True
        if epoch == self._start.epoch:
            self._start.cause = None

    def _recount_failed_start(self, now: float) -> None:
        """If the last start has failed before a report: it has trained nothing, and only the recovery from
        its failure is recorded, not the one that it was for.
        """
        start = self._start
        if start.cause is None or not self._reports:
            return
        failed, noticed = start.cause
        start.cause = None
        if not start.from_memory:
            self._rewrite(None, self._saved(start), failed, Category.REDO, only=Category.STEP)
        self._rewrite(None, failed, start.since, noticed, only=Category.STEP)
        self._rewrite(None, start.since, now, Category.RESTART, only=Category.STEP)

    def _saved(self, start: _Start) -> float:
        """Since when steps are lost that this start does again."""
        return self._committed.get(start.restored, 0.0) if start.restored else 0.0

    def _recovered(self, record: c.Recovered, now: float) -> None:
        """When it happened, and what took how long."""
        self._start.cause = None
        groups = self._start.groups or None
        hung = record.cause is not None and record.cause.kind is Kind.HANG
        began = at = now - record.total_s
        for category, seconds in (
            (Category.HANG if hung else Category.DETECT, record.detect_s),
            (Category.RESTART, record.stop_s),
            (Category.WAITING, record.wait_s),
            (Category.RESTART, record.place_s + record.start_s + record.rendezvous_s),
            (Category.RESTORE, record.restore_s),
            (Category.STEP, record.first_step_s),
        ):
            self._rewrite(groups, at, at + seconds, category)
            at += seconds
        if record.steps_lost and not self._start.from_memory and groups is None:
            self._rewrite(None, self._saved(self._start), began, Category.REDO, only=Category.STEP)

    def _stalled(self, record: records.Stalled, at: float) -> None:
        """So much of the time in which these workers trained, up to then, was for checkpoints."""
        of = Incarnation(record.epoch, record.group, record.generation)
        self.stalls_upto[of] = max(record.upto, self.stalls_upto.get(of, 0))
        left = record.seconds
        for stretch in [*self._open.values(), *reversed(self._stretches)]:
            if stretch.group != record.group or stretch.since >= at:
                continue
            if stretch.category not in _TRAINING or left <= 0:
                return  # before that, they were started
            room = max(0.0, min(stretch.until, at) - stretch.since - stretch.stalled)
            stretch.stalled += min(left, room)
            left -= min(left, room)

    # ------------------------------------------------------------------ charging

    def _turn_all(self, every: dict[int, tuple[Category, float]], now: float) -> None:
        for group in list(self._open):
            self._end(group, now)
        self._open = {
            group: _Stretch(group, category, workers, now) for group, (category, workers) in every.items()
        }

    def _each(self, category: Category, now: float) -> None:
        for group in list(self._open):
            self._turn(group, category, now)

    def _turn(self, group: int, category: Category, now: float) -> None:
        if group in self._open:
            workers = self._open[group].workers
            self._end(group, now)
            self._open[group] = _Stretch(group, category, workers, now)

    def _cut(self, now: float) -> None:
        """What each does goes on, and what it was so far can be told otherwise by itself."""
        for group, stretch in list(self._open.items()):
            self._turn(group, stretch.category, now)

    def _end(self, group: int, now: float) -> None:
        stretch = self._open.pop(group)
        if now > stretch.since and stretch.workers:
            stretch.until = now
            self._stretches.append(stretch)
        while len(self._stretches) > _REWRITABLE + _REWRITABLE_EACH * len(self._open):
            old = self._stretches.pop(0)
            old.charge(self._settled, old.until)

    def _rewrite(
        self,
        groups: Collection[int] | None,
        since: float,
        until: float,
        category: Category,
        only: Category | None = None,
    ) -> None:
        """What these groups, or all, did in this time was that; or what was ``only`` this, was that."""
        assert self._now is not None
        self._cut(self._now)
        found = []
        for stretch in self._stretches:
            concerned = stretch.group != _ABSENT and (groups is None or stretch.group in groups)
            apart = stretch.until <= since or until <= stretch.since or until <= since
            if apart or not concerned or only not in (None, stretch.category):
                found.append(stretch)
            else:
                found += stretch.pieces(max(since, stretch.since), min(until, stretch.until), category)
        self._stretches = found
