"""The user's callbacks, and the display: what watches a run. A callback that raises is logged, and never ends
the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
        self._pending: dict[tuple[Incarnation, int], dict[int, msgspec.Raw]] = {}
        self._checkpoints: dict[tuple[Incarnation, int], str] = {}
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
        moves_on = isinstance(record, c.PhaseChanged) and record.phase != "stopping"
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

    def reported(self, of: Incarnation, rank: int, index: int, metrics: msgspec.Raw) -> None:
        self._forget_before(of)
        here = self._pending.setdefault((of, index), {})
        here[rank] = metrics
        if len(here) == (self._group_size or self._world):
            del self._pending[(of, index)]
            rows: list[dict[str, Any]] = [msgspec.msgpack.decode(here[r]) for r in sorted(here)]
            address = self._checkpoints.pop((of, index), None)
            options = self._context.run_config.storage_options
            checkpoint = Checkpoint(address, storage_options=options) if address else None
            for callback in self._callbacks:
                self._call(callback, "after_report", self._context, rows, checkpoint)

    def _forget_before(self, of: Incarnation) -> None:
        """Forget reports that earlier incarnations of a group have not completed: they never will."""
        if self._newest.get(of.group) != of:
            self._newest[of.group] = of
            for waiting in (self._pending, self._checkpoints):
                for other, index in list(waiting):
                    if other.group == of.group and other != of:
                        del waiting[(other, index)]

    def committed(self, of: Incarnation, index: int, address: str) -> None:
        self._display.committed(of, index, address)
        self._checkpoints[(of, index)] = address

    def close(self) -> None:
        self._display.close()

    def _call(self, callback: UserCallback, hook: str, *arguments: object) -> None:
        try:
            getattr(callback, hook)(*arguments)
        except Exception:  # the user's own code: it may watch, not end the run
            logger.exception("callback %s.%s raised; training goes on", type(callback).__name__, hook)
