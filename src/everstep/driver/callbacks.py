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
from everstep.driver.observer import Observer
from everstep.driver.registry import LiveRun
from everstep.errors import WorkerError

logger = logging.getLogger("everstep")


class Callbacks:
    """An observer that passes everything on to the display, and tells the user's callbacks what they asked
    for.
    """

    def __init__(
        self, display: Observer, callbacks: Sequence[UserCallback], context: TrainRunContext
    ) -> None:
        self._display = display
        self._callbacks = callbacks
        self._context = context
        self._ranks: set[int] = set()
        self._pending: dict[int, dict[int, msgspec.Raw]] = {}
        self._checkpoints: dict[int, str] = {}
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
        if isinstance(record, c.PhaseChanged) and record.phase != "stopping" and self._failures:
            failures, self._failures = self._failures, {}
            for callback in self._callbacks:
                self._call(callback, "after_exception", self._context, failures)

    def say(self, line: str) -> None:
        self._display.say(line)

    def output(self, rank: int, text: str) -> None:
        self._display.output(rank, text)

    def started(self, run: LiveRun) -> None:
        self._display.started(run)
        self._ranks = {worker.rank for worker in run.workers}
        self._pending.clear()
        self._checkpoints.clear()

    def progress(self, rank: int, epoch: int, index: int, newest: list[msgspec.Raw]) -> None:
        self._display.progress(rank, epoch, index, newest)

    def reported(self, rank: int, index: int, metrics: msgspec.Raw) -> None:
        here = self._pending.setdefault(index, {})
        here[rank] = metrics
        if self._ranks and here.keys() >= self._ranks:
            del self._pending[index]
            rows: list[dict[str, Any]] = [msgspec.msgpack.decode(here[r]) for r in sorted(here)]
            address = self._checkpoints.pop(index, None)
            options = self._context.run_config.storage_options
            checkpoint = Checkpoint(address, storage_options=options) if address else None
            for callback in self._callbacks:
                self._call(callback, "after_report", self._context, rows, checkpoint)

    def committed(self, index: int, address: str) -> None:
        self._display.committed(index, address)
        self._checkpoints[index] = address

    def close(self) -> None:
        self._display.close()

    def _call(self, callback: UserCallback, hook: str, *arguments: object) -> None:
        try:
            getattr(callback, hook)(*arguments)
        except Exception:  # the user's own code: it may watch, not end the run
            logger.exception("callback %s.%s raised; training goes on", type(callback).__name__, hook)
