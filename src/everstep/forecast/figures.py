"""What a forecast counts as it runs: where the time went, what failed, and what that cost.

How these figures are presented, and what is advised because of them, is in ``answer``.
"""

from __future__ import annotations

from collections import Counter

from everstep.control.commands import Rung
from everstep.forecast.pieces import PiecewiseLedger


class Figures:
    def __init__(self, hosts: int, seconds: float) -> None:
        self.ledger = PiecewiseLedger(hosts, seconds)
        self.restarts: Counter[Rung] = Counter()
        self.worker_failures = 0
        self.host_failures = 0
        """Of hosts that the job was using."""
        self.lost_s = 0.0
        """Seconds of training that had to be done again."""
        self.recoveries: list[float] = []
        """Seconds from an interruption until every replica group trains again."""
        self.events = 0
        """How many the controller handled."""
        self._interrupted_at: float | None = None

    def interrupted(self, now: float) -> None:
        """A replica group stops training. If another one has already, this is part of that interruption."""
        if self._interrupted_at is None:
            self._interrupted_at = now

    def all_train(self, now: float) -> None:
        """Every replica group trains: an interruption, if there was one, is over."""
        if self._interrupted_at is not None:
            self.recoveries.append(now - self._interrupted_at)
            self._interrupted_at = None
