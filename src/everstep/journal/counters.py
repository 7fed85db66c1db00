"""What a run has come to, in numbers that only grow: counted from its journal.

Only records that are durable are counted. So a driver that takes the run over has counted whatever the one
before it has shown, and no counter goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from everstep.control import commands as c
from everstep.control.controller import Controller
from everstep.control.table import Phase
from everstep.failures import Kind
from everstep.journal import records

_STARTS = frozenset({Phase.PLACING.value, Phase.STARTING.value})
_STOPS = frozenset({Phase.STOPPING.value, Phase.ENDING.value})


class RunCounters:
    """``apply`` takes one record in. Another thread may read."""

    def __init__(self) -> None:
        self.drivers = 0
        self.attempts = 0
        self.reports = 0
        """Rows of the run's metrics, those that were done again among them."""
        self.steps_redone = 0
        self.restarts: Counter[Kind] = Counter()
        self.recovery_s: Counter[str] = Counter()
        """By phase."""
        self.start_s = 0.0
        """That worker groups took to start."""
        self.stop_s = 0.0
        """And to end."""
        self.phase = Phase.NEW.value
        self.outcome = ""
        self._since = 0.0
        self._saved: set[str] = set()

    @classmethod
    def of(cls, read: Iterable[records.AnyRecord]) -> RunCounters:
        figures = cls()
        for record in read:
            figures.apply(record)
        return figures

    @property
    def checkpoints(self) -> int:
        """That were committed, also those that are gone by now."""
        return len(self._saved)

    def apply(self, record: records.AnyRecord) -> None:
        match record:
            case records.Opened():
                self.drivers += 1
                # How long the phase of the driver before went on, nobody knows: clocks may differ.
                self.phase, self.outcome = Phase.NEW.value, ""
            case records.TakenOver():
                self.phase = Phase.RUNNING.value
            case records.Closed():
                self.outcome = record.outcome
            case records.Committed():
                self._saved.add(record.folder)
                self.attempts = max(self.attempts, record.epoch)
            case records.Metrics():
                self.reports += len(record.rows)
                self.attempts = max(self.attempts, record.epoch)
            case c.PhaseChanged():
                self._phase_changed(record)
            case c.RecoveryDecided():
                self.restarts[record.cause.kind] += 1
            case c.Recovered():
                self.steps_redone += record.steps_lost
                unknown = ("first_step",) if isinstance(record, records.RecoveredWithoutReport) else ()
                for phase in (phase for phase in RECOVERY_PHASES if phase not in unknown):
                    self.recovery_s[phase] += getattr(record, f"{phase}_s")
            case _:
                pass

    def _phase_changed(self, record: c.PhaseChanged) -> None:
        seconds = max(0.0, record.at - self._since)
        if self.phase in _STARTS:
            self.start_s += seconds
        elif self.phase in _STOPS:
            self.stop_s += seconds
        self.phase, self._since = record.phase, record.at
        self.attempts = max(self.attempts, record.epoch)


RECOVERY_PHASES = ("detect", "stop", "wait", "place", "start", "rendezvous", "restore", "first_step")
"""What a recovery consists of, as ``control.commands.Recovered`` has it."""


def census_of(controller: Controller, wanted: int) -> Mapping[str, int]:
    """How many workers are in which state."""
    training = sum(len(group.ranks) for group in controller.steady())
    starting = sum(len(group.ranks) for group in controller.groups.values() if not group.nowhere) - training
    return {"training": training, "starting": starting, "unplaced": max(0, wanted - starting - training)}
