"""The hang watch: from a rank that is overdue to a closer look, and from there to what is done about it.

Who is overdue and who is to blame is decided in ``hangs``, by values alone.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.control import commands as c, events as e
from everstep.control.events import TimerName
from everstep.control.failures import Failure, Kind
from everstep.control.group import Group
from everstep.control.hangs import HangVerdict, is_overdue, judge
from everstep.control.run import Run
from everstep.control.settings import OnHang
from everstep.control.table import Phase
from everstep.control.vitals import Finding, Stage
from everstep.topology.slices import HostId

Incarnation = tuple[int, int, int]
"""(attempt, replica group, generation)."""


class Look:
    """A closer look at the ranks of one group, and at those of the others that may wait for it, while it
    lasts.
    """

    def __init__(self, key: int, of: Incarnation, rank: int, hosts: set[HostId]) -> None:
        self.key = key
        self.of = of
        self.rank = rank
        """It is overdue."""
        self.awaited = hosts
        self.found: list[Finding] = []


class HangWatch:
    """``failed`` and ``give_up`` are what else happens to a run that can't go on as it is."""

    def __init__(
        self,
        run: Run,
        failed: Callable[[Failure, set[int], float], None],
        give_up: Callable[[Failure, tuple[Failure, ...], float, str], None],
    ) -> None:
        self._run = run
        self._limits = run.settings.deadlines
        self._failed = failed
        self._give_up = give_up
        self._looks: dict[int, Look] = {}
        """By replica group."""
        self._again: dict[Incarnation, tuple[float, set[int]]] = {}
        """When a group that turned out to be at work, or was warned about, is looked at again, unless another
        rank than these is overdue.
        """
        self._warned: dict[Incarnation, tuple[tuple[int, ...], float]] = {}
        """Whom the user was warned of, and how long it had been quiet then."""

    def quiet(self, event: e.WorkersQuiet) -> None:
        """These workers have made no progress for some time, which may well be right."""
        for vitals in event.vitals:
            group = self._run.group_of(vitals.rank) if event.epoch == self._run.epoch else None
            if group is None or group.generation != vitals.generation or not self._trains(group):
                continue
            if group.number in self._looks or not is_overdue(vitals, self._limits):
                continue
            of = self._incarnation(group)
            again, known = self._again.get(of, (event.at, set()))
            if event.at >= again or vitals.rank not in known:
                self._look(group, of, vitals.rank, event.at)

    def _trains(self, group: Group) -> bool:
        restarting = any(group.number in restart.groups for restart in self._run.restarts)
        return self._run.phase is Phase.RUNNING and not restarting and not group.nowhere

    def _incarnation(self, group: Group) -> Incarnation:
        return self._run.epoch, group.number, group.generation

    def _look(self, group: Group, of: Incarnation, rank: int, at: float) -> None:
        hosts = {host for other in self._run.groups.values() if self._trains(other) for host in other.hosts()}
        look = Look(self._run.next_key(), of, rank, hosts)
        self._looks[group.number] = look
        for host in sorted(look.awaited):
            self._run.do(c.ExamineWorkers(host, self._run.epoch, look.key))
        self._run.do(c.SetTimer(TimerName.EXAMINE, look.key, at + self._limits.examine_s))

    def examined(self, event: e.WorkersExamined) -> None:
        for look in list(self._looks.values()):
            if look.key == event.look and event.host in look.awaited:
                look.awaited.discard(event.host)
                look.found += event.found
                if not look.awaited:
                    self._conclude(look, event.at)

    def time_is_up(self, key: int, at: float) -> None:
        """A host that doesn't answer is left out; if it is lost, its heartbeats say so."""
        for look in list(self._looks.values()):
            if look.key == key:
                self._conclude(look, at)

    def _conclude(self, look: Look, at: float) -> None:
        run = self._run
        run.do(c.CancelTimer(TimerName.EXAMINE, look.key))
        group = run.groups.get(look.of[1])
        del self._looks[look.of[1]]
        if group is None or self._incarnation(group) != look.of or not self._trains(group):
            return  # something else has happened to it meanwhile
        found = _of(group, look.found)
        others = [other for other in run.groups.values() if other is not group]
        theirs = [f for other in others if self._trains(other) for f in _of(other, look.found)]
        verdict = judge(found, self._limits, theirs if others else None)
        overdue = {f.vitals.rank for f in found if is_overdue(f.vitals, self._limits)}
        self._again[look.of] = at + self._limits.hang_s, overdue | {look.rank}
        if verdict is not None:
            self._act(look, group, verdict, found, at)

    def _act(self, look: Look, group: Group, verdict: HangVerdict, found: list[Finding], at: float) -> None:
        run = self._run
        first = next(f for f in found if f.vitals.rank == verdict.culprits[0])
        quiet = max(f.vitals.quiet_s for f in found if f.vitals.stage is not Stage.RETURNED)
        action = run.settings.on_hang
        if action is OnHang.RESTART and not run.has_reported and not _have_begun(found):
            action = OnHang.WARN  # nothing says that this function ever reports
        if action is OnHang.WARN and self._is_warned(look.of, verdict, quiet):
            return
        stacks = f"hangs/{run.epoch:04d}-{look.key:04d}.txt"
        run.do(c.KeepStacks(stacks, tuple(found), verdict.culprits))
        message = f"{verdict.why}; stacks of all ranks are in {stacks}"
        run.do(c.HangSeen(at, run.epoch, verdict.culprits, message, stacks, action.value))
        if action is OnHang.WARN:
            return
        group.failed |= set(verdict.culprits)
        host = group.members[verdict.culprits[0]].host
        failure = Failure(
            Kind.HANG, at - quiet, message, rank=verdict.culprits[0], host=host, traceback=first.stack
        )
        if action is OnHang.FAIL:
            run.do(c.FailureSeen(at, failure))
            self._give_up(failure, (failure,), at, "FailureConfig(on_hang='fail')")
        else:
            self._failed(failure, {group.number}, at)

    def _is_warned(self, of: Incarnation, verdict: HangVerdict, quiet: float) -> bool:
        """Whether this is what was warned about already. Who has moved since is warned about again."""
        before = self._warned.get(of)
        self._warned[of] = (verdict.culprits, quiet)
        return before is not None and before[0] == verdict.culprits and quiet >= before[1]


def _of(group: Group, found: list[Finding]) -> list[Finding]:
    """Of the workers that the group has now."""
    present = group.ranks - group.gone
    return [f for f in found if f.vitals.rank in present and f.vitals.generation == group.generation]


def _have_begun(found: list[Finding]) -> bool:
    return any(f.vitals.reports or f.vitals.collectives for f in found)
