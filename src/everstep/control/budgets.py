"""How often a run may recover, how long it pauses between recoveries, and which hosts it had better leave
out.
"""

from __future__ import annotations

from everstep.control.deadlines import Deadlines
from everstep.control.failures import Budget, Failure
from everstep.topology.slices import HostId

UNLIMITED = -1


class Budgets:
    """What may be spent, and what has been. A limit of n allows n recoveries; -1 is without limit."""

    def __init__(self, limits: dict[Budget, int], spent: dict[Budget, int] | None = None) -> None:
        self.limits = {budget: limits.get(budget, UNLIMITED) for budget in Budget}
        self.spent = {budget: (spent or {}).get(budget, 0) for budget in Budget}

    def left(self, budget: Budget) -> bool:
        limit = self.limits[budget]
        return limit == UNLIMITED or self.spent[budget] < limit

    def spend(self, budget: Budget) -> bool:
        """Spend one recovery. False when none was left, and then nothing is spent."""
        if not self.left(budget):
            return False
        self.spent[budget] += 1
        return True


class FirstStarts:
    """Starts in a row that failed in the same way, before the run ever trained: more of them won't help."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._way = ""
        self._in_a_row = 0

    def failed(self, cause: Failure) -> bool:
        """One more. True if it was the last that is worth trying."""
        way = cause.way
        self._in_a_row = self._in_a_row + 1 if way == self._way else 1
        self._way = way
        return self._in_a_row >= self.limit


class Backoff:
    """The pause before a recovery: none for the first, then growing to a cap.

    A healthy stretch resets it: a new checkpoint or snapshot, or long enough without a failure.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._in_a_row = 0
        self._healthy_since: float | None = None

    def healthy(self, at: float) -> None:
        """Training goes on, since at least now."""
        if self._healthy_since is None:
            self._healthy_since = at

    def progressed(self) -> None:
        """Something was learnt and kept: whatever fails next is not the same failure again and again."""
        self._in_a_row = 0

    def next_pause(self, at: float) -> float:
        """How long to wait before the recovery from a failure noticed now."""
        limits = self._deadlines
        if self._healthy_since is not None and at - self._healthy_since >= limits.healthy_s:
            self._in_a_row = 0
        self._healthy_since = None
        n = self._in_a_row
        self._in_a_row += 1
        if n == 0:
            return 0.0
        # The exponent is capped so that a run which fails for days can't overflow a float.
        return min(limits.backoff_max_s, limits.backoff_first_s * limits.backoff_factor ** min(n - 1, 64))


class Suspects:
    """Hosts that keep failing are set aside for a while."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._blamed: dict[HostId, list[float]] = {}
        self._until: dict[HostId, float] = {}

    def blame(self, host: HostId, at: float) -> float | None:
        """One more failure of this host. Returns until when it is set aside, if that begins now."""
        limits = self._deadlines
        recent = [t for t in self._blamed.get(host, []) if at - t < limits.set_aside_s]
        self._blamed[host] = [*recent, at]
        if len(recent) + 1 < limits.set_aside_after:
            return None
        del self._blamed[host]
        self._until[host] = at + limits.set_aside_s
        return self._until[host]

    def set_aside(self, at: float) -> frozenset[HostId]:
        """The hosts that are left out now."""
        return frozenset(host for host, until in self._until.items() if at < until)
