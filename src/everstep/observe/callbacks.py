"""The user's callbacks, and the display: what watches a run. A callback that raises is logged, and never ends
the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.callbacks import TrainRunContext, UserCallback
from everstep.checkpoint import Checkpoint
from everstep.control import commands as c
from everstep.errors import WorkerError
from everstep.identity import Incarnation
from everstep.journal.ledger import RunLedger
from everstep.observe.observer import NewReports, Observer
from everstep.observe.registry import LiveRun

logger = logging.getLogger("everstep")

_Key = tuple[Incarnation, int]
"""Which report of which workers."""


@dataclass
class _Report:
    """Until callbacks are told of it."""

    metrics: dict[int, msgspec.Raw] = field(default_factory=dict)
    """By rank."""
    whole: bool = False
    """All ranks have made it."""
    saves: bool = False
    """A checkpoint comes with it."""
    settled: bool = False
    """What has become of that is known."""
    address: str | None = None
    """Of the checkpoint, if it is committed."""


class Callbacks:
    """An observer that passes everything on to the display, and calls the user's callbacks."""

    def __init__(
        self, display: Observer, callbacks: Sequence[UserCallback], context: TrainRunContext
    ) -> None:
        self._display = display
        self._callbacks = callbacks
        self._context = context
        self._group_size = context.scaling_config.replica_group_size
        self._world = 0
        self._newest: dict[int, Incarnation] = {}
        """By replica group."""
        self._pending: dict[_Key, _Report] = {}
        self._failures: dict[int, Exception] = {}

    def record(self, record: c.Record) -> None:
        self._display.record(record)
        if isinstance(record, c.FailureSeen) and record.failure.rank is not None:
            failure = record.failure
            self._failures.setdefault(
                record.failure.rank,
                WorkerError(
                    record.failure.rank, failure.host or "", failure.message, traceback=failure.traceback
                ),
            )
        moves_on = isinstance(record, c.PhaseChanged) and record.phase not in ("settling", "stopping")
        if self._failures and (moves_on or isinstance(record, c.RecoveryDecided)):
            failures, self._failures = self._failures, {}
            for callback in self._callbacks:
                self._call(callback, "after_exception", self._context, failures)

    def say(self, line: str) -> None:
        self._display.say(line)

    def opened(self, ledger: RunLedger) -> None:
        self._display.opened(ledger)

    def output(self, rank: int, text: str) -> None:
        self._display.output(rank, text)

    def started(self, run: LiveRun) -> None:
        self._display.started(run)
        self._world = len(run.workers)

    def progress(self, rank: int, epoch: int, index: int, newest: NewReports) -> None:
        self._display.progress(rank, epoch, index, newest)

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw, saves: bool) -> None:
        if self._newest.get(of.group) != of:
            self._newest[of.group] = of
            self._give_up([key for key in self._pending if key[0].group == of.group])
        report = self._pending.setdefault((of, index), _Report())
        report.metrics[rank] = metrics
        report.whole = len(report.metrics) == (self._group_size or self._world)
        report.saves |= saves
        self._tell_if_due((of, index))

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        self._display.committed(of, index, address)
        self._settled((of, index), address)

    def unsaved(self, of: Incarnation, index: int) -> None:
        self._display.unsaved(of, index)
        self._settled((of, index), None)

    def _settled(self, key: _Key, address: str | None) -> None:
        report = self._pending.get(key)  # None: no callback looks at reports, or this one had no metrics
        if report is not None:
            report.settled, report.address = True, address
            self._tell_if_due(key)

    def _tell_if_due(self, key: _Key) -> None:
        report = self._pending[key]
        if report.whole and (report.settled or not report.saves):
            self._tell(self._pending.pop(key))

    def _give_up(self, keys: list[_Key]) -> None:
        """What these reports lack will never come."""
        for key in keys:
            report = self._pending.pop(key)
            if report.whole:
                self._tell(report)

    def _tell(self, report: _Report) -> None:
        ranks = sorted(report.metrics)
        rows: list[dict[str, Any]] = [msgspec.msgpack.decode(report.metrics[rank]) for rank in ranks]
        options = self._context.run_config.storage_options
        checkpoint = Checkpoint(report.address, storage_options=options) if report.address else None
        for callback in self._callbacks:
            self._call(callback, "after_report", self._context, rows, checkpoint)

    def close(self) -> None:
        self._give_up([*self._pending])
        self._display.close()

    def _call(self, callback: UserCallback, hook: str, *arguments: object) -> None:
        try:
            getattr(callback, hook)(*arguments)
        except Exception:  # the user's own code: it may watch, not end the run
            logger.exception("callback %s.%s raised; training goes on", type(callback).__name__, hook)
