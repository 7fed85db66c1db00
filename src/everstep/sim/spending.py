"""Each budget is spent by its own cause, once an incident, and a run with budget left does not end."""

from __future__ import annotations

from collections import Counter

from everstep.control import commands as c
from everstep.control.budgets import BUDGET_OF, Budget
from everstep.control.commands import Outcome
from everstep.control.controller import Controller, beliefs_of
from everstep.sim.cluster import Cluster
from everstep.sim.scenario import FaultKind, Scenario
from everstep.sim.time import require

_MAY_SPEND = {
    Budget.FAILURES: {
        FaultKind.CRASH,
        FaultKind.TEMPLATE,
        FaultKind.LOSS,
        FaultKind.FREEZE,
        FaultKind.STUCK,
        FaultKind.FLAP,
        FaultKind.NOTICE,
        FaultKind.RACK,
        FaultKind.STORAGE,
        FaultKind.HANG,
        FaultKind.POWER,
        FaultKind.RETURN,
    },
    Budget.PREEMPTION: {FaultKind.PREEMPT, FaultKind.NOTICE},
    # A start fails by itself, or because something dies during it.
    Budget.STARTUP: set(FaultKind) - {FaultKind.DUPLICATE, FaultKind.STOP},
}
"""Which faults may cost a run something of a budget; any, of one that isn't here."""


_UNCOUNTED = {FaultKind.STORAGE, FaultKind.CUT, FaultKind.DISK}
"""While storage is away, start after start may come too late."""


class Spending:
    """Of one controller."""

    def __init__(self, scenario: Scenario, cluster: Cluster, controller: Controller) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._controller = controller
        self.spent: Counter[Budget] = Counter()

    def check(self, command: c.RecoveryDecided) -> None:
        """6."""
        budget = Budget(command.budget)
        self.spent[budget] += 1
        own = budget
        if budget is Budget.REPLICAS:
            own = Budget.FAILURES
            require(bool(command.groups), "6: what replacing groups may cost is spent by a full restart")
        require(BUDGET_OF[command.cause.kind] is own, "6: a budget is spent by its own cause")
        require(command.spent == self.spent[budget], "6: one incident spends one")
        within = command.limit == -1 or command.spent <= command.limit
        require(within, "6: no more is spent than there is")
        require(
            self._may_spend(budget),
            f"6: {command.cause.kind} spends {budget}, and nothing of the kind happened",
        )
        if self._scenario.families & _UNCOUNTED:
            return
        total, charges = self.spent.total(), self._cluster.charges
        require(total <= charges, f"6: {charges} things went wrong, and {total} recoveries are spent")

    def _may_spend(self, budget: Budget) -> bool:
        """Something happened that costs this. A preemption does if its notice could not be
        received in time.
        """
        cause = Budget.FAILURES if budget is Budget.REPLICAS else budget
        unheard = cause is Budget.FAILURES and self._cluster.unheard
        return unheard or bool(_MAY_SPEND.get(cause, set(FaultKind)) & self._scenario.families)

    def check_end(self, command: c.EndRun) -> None:
        """6: a run ends for a reason that the user can understand."""
        if command.outcome is Outcome.FAILED:
            assert command.cause is not None
            budget = BUDGET_OF[command.cause.kind]
            if budget is None:
                require(self._scenario.unloadable, "6: what can be retried is retried")
                return
            budgets = beliefs_of(self._controller).budgets
            limit = budgets.limits[budget]
            is_spent = limit != -1 and budgets.spent[budget] >= limit
            require(is_spent, f"6: the run ends with {budget} left")
            require(self._may_spend(budget), f"6: {budget} is spent by another's cause")
        if command.outcome is Outcome.STOPPED:
            require(FaultKind.STOP in self._scenario.families, "only the user stops a run")
