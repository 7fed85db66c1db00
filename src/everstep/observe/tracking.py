"""Logs a run's metrics to trackers: on a thread for each, from the run's history, beside training.

The history has what earlier drivers recorded, too. What a tracker has already is skipped: so steps that are
done again after a restart are not logged twice, and those that a killed driver had not logged are logged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from everstep.callbacks import TrainRunContext
from everstep.integrations.tracker import LoggedRow, Tracker
from everstep.journal.history import History
from everstep.observe.decoding import decoded_numbers

_POLL_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MOST_ROWS = 1000
"""At once."""

logger = logging.getLogger("everstep")


@contextlib.contextmanager
def tracked(history: History, context: TrainRunContext) -> Iterator[None]:
    """While this lasts, the run's metrics are logged; all of them, when it ends."""
    every = [
        TrackerThread(cb, history, context) for cb in context.run_config.callbacks if isinstance(cb, Tracker)
    ]
    for thread in every:
        thread.start()
    try:
        yield
    finally:
        deadline = time.monotonic() + context.run_config.deadlines.trackers_s
        for thread in every:
            thread.closing.set()
        for thread in every:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s has not logged everything in time (Deadlines.trackers_s)", thread.name)


class TrackerThread(threading.Thread):
    def __init__(self, tracker: Tracker, history: History, context: TrainRunContext) -> None:
        super().__init__(name=type(tracker).__name__, daemon=True)
        self.closing = threading.Event()
        self._tracker = tracker
        self._history = history
        self._context = context
        self._rows: TrackedRows | None = None
        """None: the tracker isn't open."""

    def run(self) -> None:
        pause_s = _POLL_S
        while True:
            ends = self.closing.wait(pause_s)
            try:
                self._log_news()
                if ends:
                    self._close()
                    return
                pause_s = _POLL_S
            except Exception as error:  # somebody else's code, and the network: it may fail, not end the run
                self._rows = None
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                then = (
                    "not all is logged"
                    if ends
                    else f"training goes on, and it is tried again in {pause_s:g} s"
                )
                logger.warning("%s: %s: %s; %s", self.name, type(error).__name__, error, then)
                if ends:
                    return

    def _log_news(self) -> None:
        if self._rows is None:
            last = self._tracker.open(self._context)
            self._rows = TrackedRows(self._history, last, self._tracker.step_metric)
        while rows := self._rows.take(_MOST_ROWS):
            self._tracker.log(rows)

    def _close(self) -> None:
        # A driver that was replaced doesn't say how the run ends: it goes on.
        if self._history.outcome:
            self._tracker.close(self._history.outcome)


class TrackedRows:
    """The rows of a history whose steps are later than all before, in order."""

    def __init__(self, history: History, last: int, step_metric: str | None) -> None:
        self._history = history
        self._last = last
        self._step_metric = step_metric
        self._record = 0
        self._row = 0

    def take(self, most: int) -> list[LoggedRow]:
        found: list[LoggedRow] = []
        while len(found) < most and self._record < len(self._history.reported):
            record = self._history.reported[self._record]
            first = self._history.numbers[self._record]
            if self._step_metric is None and self._last >= first + len(record.rows) - 1:
                self._row = len(record.rows)  # known without a look
            if self._row == len(record.rows):
                self._record, self._row = self._record + 1, 0
                continue
            metrics = decoded_numbers(record.rows[self._row])
            step = self._step_of(metrics, first + self._row)
            self._row += 1
            if step > self._last and metrics:
                found.append(LoggedRow(step, metrics))
                self._last = step
        return found

    def _step_of(self, metrics: dict[str, float], number: int) -> int:
        if self._step_metric is None:
            return number
        step = metrics.get(self._step_metric)
        # Without a step there is no place for it on the curve.
        return int(step) if step is not None and abs(step) < 2**53 else self._last
