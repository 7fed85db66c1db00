"""What the leaders of replica groups report in this epoch, and which of it the run's metrics are.

A group's reports go with its checkpoints. Those of one group, the first that trains, are the run's own: rows
of its history, in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from everstep.driver.streams import WorkerStream
from everstep.identity import Incarnation
from everstep.journal import records
from everstep.protocol import worker_messages
from everstep.protocol.metrics import NO_METRICS


class RunMetrics:
    def __init__(self, write: Callable[[records.AnyRecord], None]) -> None:
        self.source = 0
        """The group whose reports are the run's metrics."""
        self._write = write
        self._reported: dict[tuple[int, int], dict[int, msgspec.Raw]] = {}
        """By (group, generation) and index."""
        self._with_last_state: dict[tuple[int, int, int], msgspec.Raw] = {}
        """By (group, generation, index): what was reported last, before a report that only saves."""
        self._waiting: list[msgspec.Raw] = []
        """Not in the journal yet."""
        self._of = Incarnation(0, 0, 0)
        """Whose those are."""
        self._first = 1
        """The index of the first of those."""

    def recall(self, reported: Mapping[tuple[int, int], Mapping[int, msgspec.Raw]]) -> None:
        """Reports that an earlier driver has received."""
        self._reported = {of: dict(rows) for of, rows in reported.items()}

    def restart(self) -> None:
        """All workers start anew."""
        self.flush()
        self._reported.clear()
        self._with_last_state.clear()

    def add(self, epoch: int, stream: WorkerStream, reports: Iterable[worker_messages.Report]) -> None:
        """What one worker has reported, in order."""
        of = (stream.assignment.group_id, stream.generation)
        whose, is_source = Incarnation(epoch, *of), of[0] == self.source
        known = self._reported.setdefault(of, {})
        for report in reports:
            index = report.index
            if index in known:
                continue  # repeated, and in the journal already
            known[index] = report.metrics
            if is_source:
                if whose != self._of or index != self._first + len(self._waiting):
                    self.flush()
                    self._of, self._first = whose, index
                self._waiting.append(report.metrics)

    def add_silent(self, stream: WorkerStream, index: int, metrics: msgspec.Raw) -> None:
        """A report that is no row: what it saves is of the one before, and so are its metrics."""
        self._with_last_state[(stream.assignment.group_id, stream.generation, index)] = metrics

    def newest(self, stream: WorkerStream) -> msgspec.Raw | None:
        """The row that this worker has just added to the run's metrics, if it has."""
        of = (stream.assignment.group_id, stream.generation)
        is_source = stream.assignment.group_rank == 0 and of[0] == self.source
        return self._reported.get(of, {}).get(stream.upto) if is_source else None

    def with_checkpoint(self, group: int, generation: int, index: int) -> msgspec.Raw:
        silent = self._with_last_state.get((group, generation, index), NO_METRICS)
        return self._reported.get((group, generation), {}).get(index, silent)

    def flush(self) -> None:
        """Into the journal."""
        if self._waiting:
            epoch, group, generation = self._of
            self._write(records.Metrics(epoch, self._first, self._waiting, group, generation))
            self._first += len(self._waiting)
            self._waiting = []
