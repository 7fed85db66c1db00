"""The hang watch: when workers that stand still are to be examined, and what the user was warned of."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.deadlines import Deadlines
from everstep.health.hangs import HangVerdict, is_overdue, judge
from everstep.health.vitals import Finding, Stage, Vitals
from everstep.identity import Incarnation


class HangWatch:
    def __init__(self, limits: Deadlines) -> None:
        self.has_reported = False
        """Some worker has: so this training function reports, and one that doesn't is late."""
        self._limits = limits
        self._again: dict[Incarnation, tuple[float, set[int]]] = {}
        """When a group that turned out to be at work, or was warned about, is examined again; at once, if
        another rank than these is overdue.
        """
        self._warned: dict[Incarnation, tuple[tuple[int, ...], float]] = {}
        """The ranks that the user was warned of, and for how long they had been quiet then."""

    def needs_check(self, of: Incarnation, vitals: Vitals, now: float, commits: bool = False) -> bool:
        """Whether a rank that makes no progress is reason to examine every rank. ``commits``: checkpoints of
        its group are being committed. A rank that has many of those waits for storage, as its driver does.
        """
        if commits and vitals.stage is Stage.CHECKPOINT:
            return False
        again, known = self._again.get(of, (now, set()))
        return is_overdue(vitals, self._limits) and (now >= again or vitals.rank not in known)

    def judge(
        self,
        of: Incarnation,
        rank: int,
        found: Sequence[Finding],
        others: Sequence[Finding] | None,
        now: float,
    ) -> HangVerdict | None:
        """Who hangs in this group, of which a rank was overdue. ``others``: of the other groups, if any."""
        overdue = {one.vitals.rank for one in found if is_overdue(one.vitals, self._limits)}
        self._again[of] = now + self._limits.hang_s, overdue | {rank}
        return judge(found, self._limits, others)

    def have_begun(self, found: Sequence[Finding]) -> bool:
        """Whether anything says that this training function ever reports."""
        return self.has_reported or any(one.vitals.reports or one.vitals.collectives for one in found)

    def is_warned(self, of: Incarnation, verdict: HangVerdict, quiet_s: float) -> bool:
        """Whether the user was warned of this already. A rank that has moved since is warned about again."""
        before = self._warned.get(of)
        self._warned[of] = (verdict.culprits, quiet_s)
        return before is not None and before[0] == verdict.culprits and quiet_s >= before[1]


def quiet_for(found: Sequence[Finding]) -> float:
    """For how long they have made no progress: the longest of those that still run."""
    return max(one.vitals.quiet_s for one in found if one.vitals.stage is not Stage.RETURNED)
