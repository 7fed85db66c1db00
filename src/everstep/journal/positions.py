"""Where each report stands in training: its number, counted on from what the last restart went back to.

Workers count their reports from 1 at every start. A step that is done again after a restart has the number
that it had before.
"""

from __future__ import annotations

from everstep.control import commands as c
from everstep.identity import Incarnation
from everstep.journal import records


class Positions:
    """``take`` takes one record in."""

    def __init__(self) -> None:
        self.furthest = 0
        """The number of the report that was recorded last."""
        self._bases: dict[int, int] = {}
        """Reports before each attempt, that it goes on from."""
        self._replaced: dict[Incarnation, int] = {}
        """The same for replica groups that were replaced, by (epoch, group, generation)."""
        self._before: dict[int, int] = {}
        """How far the run was when each attempt began."""
        self._from_memory: set[int] = set()
        """Attempts that went back to a position which is known only when their recovery has ended."""
        self._saved: dict[str, int] = {}
        """After how many reports each checkpoint was made."""

    def base(self, attempt: int) -> int:
        """How many reports come before those of this attempt."""
        return self._bases.get(attempt, 0)

    def take(self, record: records.AnyRecord) -> int:
        """The number of the first row, if there are any in it."""
        match record:
            case records.Committed():
                self._saved[record.folder] = self.base(record.epoch) + record.index
            case records.Deleted() | records.Damaged():
                self._saved.pop(record.folder, None)
            case records.Metrics():
                return self._reported(record)
            case c.PhaseChanged() if record.epoch not in self._bases:
                self._begin(record.epoch, max(self._saved.values(), default=0))
            case c.GroupStarted() if not record.rung.is_partial:
                self._started(record)
            case c.Recovered() if not record.rung.is_partial and record.epoch in self._from_memory:
                self._bases[record.epoch] = max(0, self._before[record.epoch] - record.steps_lost)
                self._from_memory.discard(record.epoch)
            case _:
                pass
        return 0

    def _started(self, record: c.GroupStarted) -> None:
        if record.snapshot is not None:
            self._begin(record.epoch, self.base(record.snapshot.epoch) + record.snapshot.report)
        elif record.from_memory:  # of which snapshot, earlier versions didn't say
            self._begin(record.epoch, self.furthest)
            self._from_memory.add(record.epoch)
        else:
            self._begin(record.epoch, self._saved.get(record.checkpoint, 0) if record.checkpoint else 0)

    def _begin(self, attempt: int, base: int) -> None:
        self._bases[attempt] = base
        self._before.setdefault(attempt, self.furthest)

    def _reported(self, record: records.Metrics) -> int:
        base = self.base(record.epoch)
        if record.generation:
            # A group that was replaced counts from 1 again, and goes on where the others are.
            of = Incarnation(record.epoch, record.group, record.generation)
            base = self._replaced.setdefault(of, self.furthest + 1 - record.first)
        elif record.number:
            base = self._bases[record.epoch] = record.number - record.first
        self.furthest = base + record.first + len(record.rows) - 1
        return base + record.first
