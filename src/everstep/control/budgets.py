"""How often a run may recover, for which causes, and how long it pauses between recoveries."""

from __future__ import annotations

import enum

from everstep.backoff import Backoff
from everstep.control.settings import Settings
from everstep.failures import FirstStarts, Kind

UNLIMITED = -1


class Budget(enum.StrEnum):
    """Each budget is spent by its own causes only."""

    FAILURES = "max_failures"
    STARTUP = "controller_failure_limit"
    PREEMPTION = "max_preemption_failures"
    REPLICAS = "max_replica_failures"


BUDGET_OF: dict[Kind, Budget | None] = {
    **dict.fromkeys(Kind, Budget.FAILURES),
    **dict.fromkeys((Kind.START, Kind.RESERVATION), Budget.STARTUP),
    Kind.PREEMPTED: Budget.PREEMPTION,
    **dict.fromkeys((Kind.LOAD, Kind.STORAGE, Kind.LIMIT, Kind.CONFLICT)),
}
"""Which budget a cause spends. ``None``: it is never retried."""


class Budgets:
    """What may be spent, and what has been. A limit of n allows n recoveries; -1 is without limit."""

    def __init__(self, settings: Settings) -> None:
        self.limits = {
            Budget.FAILURES: settings.max_failures,
            Budget.STARTUP: settings.controller_failure_limit,
            Budget.PREEMPTION: settings.max_preemption_failures,
            Budget.REPLICAS: settings.max_replica_failures or 0,
        }
        self.spent = dict.fromkeys(Budget, 0)
        self.backoff = Backoff(settings.deadlines)
        self.first_starts = FirstStarts(settings.deadlines.first_start_attempts)
        self.warned_unsaved = False
        """The user has been warned that there is no checkpoint of what the groups that go on have trained."""

    def left(self, budget: Budget) -> bool:
        limit = self.limits[budget]
        return limit == UNLIMITED or self.spent[budget] < limit

    def spend(self, budget: Budget) -> bool:
        """Spend one recovery. False when none was left, and then nothing is spent."""
        if not self.left(budget):
            return False
        self.spent[budget] += 1
        return True
