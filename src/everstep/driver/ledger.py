"""A run's ledger, from its journal: the same for a live view, a result, and whoever reads the run later.

What a stretch of time was is often known only afterwards: that steps were lost, when a failure had happened,
that workers trained on while no driver was there. So what was charged is charged again, in whole, when a
record tells.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everstep.control import commands as c
from everstep.control.failures import Kind
from everstep.control.ledger import Category, Ledger
from everstep.driver import records

_ABSENT = -1
"""The workers that are wanted, and that there is no place for."""
_REWRITABLE = 256
"""Of the newest stretches, what they were may still be told otherwise."""


class _Stretch(msgspec.Struct):
    """Workers of one replica group, for some time."""

    group: int
    category: Category
    workers: float
    since: float
    until: float


class RunLedger:
    """``apply`` takes one record in; ``until`` is what that comes to, also for another thread."""

    def __init__(self) -> None:
        self._settled = Ledger()
        self._stretches: list[_Stretch] = []
        self._open: dict[int, tuple[Category, float, float]] = {}
        """What each replica group does: (category, workers, since)."""
        self._wanted = 0
        self._offset = 0.0
        self._now: float | None = None
        self._closed = True
        self._away: dict[int, tuple[float, float]] = {}
        """When a driver was lost and the next came, by the replica groups that trained."""
        self._started: set[int] = set()
        """The replica groups of the last start, if not all."""
        self._committed: dict[str, float] = {}
        self._restored = ""
        """The checkpoint that the last start went back to; with ``_from_memory`` it did not."""
        self._from_memory = False

    # ------------------------------------------------------------------ taking records in

    def apply(self, record: records.AnyRecord) -> None:
        if isinstance(record, records.Opened):
            self._offset = record.wall - record.at
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
            case records.Deleted():
                self._committed.pop(record.folder, None)
            case records.Closed():
                self._turn_all({}, now)
                self._closed = True
            case c.PhaseChanged():
                self._phase(record.phase, now)
            case c.GroupStarted():
                self._group_started(record, now)
            case c.Recovered():
                self._recovered(record, now)
            case _:
                pass

    def until(self, at: float | None = None) -> Ledger:
        """Up to this time by the clock of the driver that wrote last, or up to its last record."""
        ledger = Ledger()
        ledger.total.update(self._settled.total)
        for stretch in list(self._stretches):
            ledger.charge(stretch.category, stretch.workers, stretch.since, stretch.until)
        now = self._now if at is None else at + self._offset
        for category, workers, since in list(self._open.values()):
            ledger.charge(category, workers, since, now if now is not None else since)
        return ledger

    # ------------------------------------------------------------------ what records say

    def _opened(self, record: records.Opened, before: float | None, now: float) -> None:
        self._wanted = max(1, record.workers_max)  # without workers, this process trains
        if self._closed or before is None:
            self._closed = False
            self._turn_all({0: (Category.RESTART, float(self._wanted))}, now)
            return
        self._away = {
            group: (before, now)
            for group, (category, _, _) in self._open.items()
            if category is Category.STEP and group != _ABSENT
        }
        self._each(Category.AWAY, before)
        self._each(Category.RESTART, now)

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
            case "ended":
                self._turn_all({}, now)
            case _:
                self._each(Category.RESTART, now)

    def _group_started(self, record: c.GroupStarted, now: float) -> None:
        groups = {group for group, _ in record.generations}
        self._restored, self._from_memory = record.checkpoint or "", record.from_memory
        partial = record.rung is c.Rung.REPLACE_GROUPS
        self._started = groups if partial else set()
        others = {g: (cat, w) for g, (cat, w, _) in self._open.items() if g not in {*groups, _ABSENT}}
        if not partial:
            others = {}
        size = (record.world_size - sum(workers for _, workers in others.values())) / max(1, len(groups))
        every = {**others, **dict.fromkeys(groups, (Category.STEP, size))}
        every[_ABSENT] = (Category.WAITING, max(0.0, self._wanted - record.world_size))
        self._turn_all(every, now)

    def _recovered(self, record: c.Recovered, now: float) -> None:
        """When it happened, and what took how long."""
        groups = self._started or None
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
        if record.steps_lost and not self._from_memory and groups is None:
            saved = self._committed.get(self._restored, 0.0) if self._restored else 0.0
            self._rewrite(None, saved, began, Category.REDO, only=Category.STEP)

    # ------------------------------------------------------------------ charging

    def _turn_all(self, every: dict[int, tuple[Category, float]], now: float) -> None:
        for group in list(self._open):
            self._end(group, now)
        self._open = {group: (category, workers, now) for group, (category, workers) in every.items()}

    def _each(self, category: Category, now: float) -> None:
        for group in list(self._open):
            self._turn(group, category, now)

    def _turn(self, group: int, category: Category, now: float) -> None:
        if group in self._open:
            workers = self._open[group][1]
            self._end(group, now)
            self._open[group] = (category, workers, now)

    def _end(self, group: int, now: float) -> None:
        category, workers, since = self._open.pop(group)
        if now > since and workers:
            self._stretches.append(_Stretch(group, category, workers, since, now))
        while len(self._stretches) > _REWRITABLE:
            old = self._stretches.pop(0)
            self._settled.charge(old.category, old.workers, old.since, old.until)

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
        for group, (now_is, _, _) in list(self._open.items()):
            self._turn(group, now_is, self._now)  # so that what has been going on can be told otherwise too
        found = []
        for stretch in self._stretches:
            concerned = stretch.group != _ABSENT and (groups is None or stretch.group in groups)
            apart = stretch.until <= since or until <= stretch.since or until <= since
            if apart or not concerned or only not in (None, stretch.category):
                found.append(stretch)
                continue
            first, last = max(since, stretch.since), min(until, stretch.until)
            pieces = (
                (stretch.category, stretch.since, first),
                (category, first, last),
                (stretch.category, last, stretch.until),
            )
            found += [
                _Stretch(stretch.group, kind, stretch.workers, begins, ends)
                for kind, begins, ends in pieces
                if ends > begins
            ]
        self._stretches = found
