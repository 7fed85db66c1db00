"""What an incident costs: which budget it spends, whether that was one too many, and what is told of it."""

from __future__ import annotations

from everstep.control import commands as c
from everstep.control.budgets import FirstStarts
from everstep.control.ending import Ending
from everstep.control.failures import BUDGET_OF, Budget, Failure, Incident, Kind
from everstep.control.restart import Restart
from everstep.control.run import Run

# A user's exception says nothing about the machine that it was raised on.
_BLAMES_HOST = frozenset(
    {Kind.EXIT, Kind.SIGNAL, Kind.HOST_LOST, Kind.HOST_SILENT, Kind.START, Kind.TEMPLATE}
)


class Charges:
    def __init__(self, run: Run, ending: Ending) -> None:
        self._run = run
        self._ending = ending
        self._first_starts = FirstStarts(run.settings.deadlines.first_start_attempts)
        self._told_unsaved = False

    def affords(self, restart: Restart, incident: Incident) -> bool:
        """Whether a replacement of some groups may be paid for, or everything must restart instead."""
        budget = self._budget_of(restart, incident.cause)
        return budget is not Budget.REPLICAS or self._run.budgets.left(budget)

    def charge(self, restart: Restart, incident: Incident, at: float) -> bool:
        """False: that was one too many, and the run ends."""
        assert not incident.charged, "an incident is charged once"
        why = self._why_not(restart, incident.cause)
        if why is not None:
            self._ending.give_up(incident.cause, tuple(incident.failures), at, why)
            return False
        incident.charged = True
        self._blame(incident.cause, at)
        return True

    def _why_not(self, restart: Restart, cause: Failure) -> str | None:
        budget = self._budget_of(restart, cause)
        if budget is None:
            return "this can't be retried"
        if cause.kind is Kind.START and not self._run.trained and self._first_starts.failed(cause):
            limit = self._first_starts.limit
            return f"the start failed {limit} times in the same way, and nothing was trained"
        if not self._run.budgets.spend(budget):
            limit = self._run.budgets.limits[budget]
            return f"{budget.value}={limit} is used up" if limit else f"no restart allowed ({budget.value}=0)"
        return None

    def _budget_of(self, restart: Restart, cause: Failure) -> Budget | None:
        """Replacing groups spends a budget of its own, if there is one."""
        budget = BUDGET_OF[cause.kind]
        own = not restart.full and self._run.settings.max_replica_failures is not None
        return Budget.REPLICAS if own and budget is Budget.FAILURES else budget

    def _blame(self, cause: Failure, at: float) -> None:
        if cause.host is not None and not cause.echo and cause.kind in _BLAMES_HOST:
            until = self._run.fleet.suspects.blame(cause.host, at)
            if until is not None:
                self._run.do(c.HostSetAside(at, cause.host, until))

    def tell(self, restart: Restart, cause: Failure, pause: float, at: float) -> None:
        budget = self._budget_of(restart, cause)
        assert budget is not None
        budgets = self._run.budgets
        groups = () if restart.full else tuple(sorted(restart.groups))
        spent, limit = budgets.spent[budget], budgets.limits[budget]
        unsaved = 0 if restart.full or self._told_unsaved else self._unsaved(restart)
        self._told_unsaved = self._told_unsaved or bool(unsaved)
        self._run.do(c.RecoveryDecided(at, cause, budget, spent, limit, groups, pause, unsaved))

    def _unsaved(self, restart: Restart) -> int:
        """Steps of the groups that go on while there is no checkpoint."""
        others = [g for g in self._run.groups.values() if g.number not in restart.groups]
        return 0 if self._run.checkpoints.newest else max((g.book.furthest for g in others), default=0)
