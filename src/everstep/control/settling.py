"""What is waited for between a failure and the end of the other workers: its cause, if it looks like an echo
of another failure; and a report that the failed rank had made, and healthy ranks are about to make.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.control import commands as c
from everstep.control.events import TimerName
from everstep.control.failures import Failure
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.table import Phase


class Settling:
    def __init__(self, run: Run, stop: Callable[[Restart, float], None]) -> None:
        self._run = run
        self._stop = stop

    def begin(self, restart: Restart, failure: Failure, at: float) -> None:
        run, limits = self._run, self._run.settings.deadlines
        starting = restart.stage is Phase.STARTING
        waits = {
            TimerName.SETTLE: limits.settle_s if failure.echo and not starting else 0.0,
            TimerName.FINISH_REPORT: limits.finish_report_s if self._awaits_report(restart) else 0.0,
        }
        restart.awaits = {timer for timer, seconds in waits.items() if seconds > 0}
        if not restart.awaits:
            self._stop(restart, at)
            return
        # A start that has failed is over, also while a report of those that have started is waited for.
        run.stage(restart, Phase.STOPPING if starting else Phase.SETTLING, at)
        for timer in sorted(restart.awaits):
            run.do(c.SetTimer(timer, restart.key, at + waits[timer]))

    def joined(self, restart: Restart, failure: Failure, at: float) -> None:
        """Another failure of the same incident. One that is no echo is the cause."""
        self._check(restart, at, None if failure.echo else TimerName.SETTLE)

    def came_further(self, at: float) -> None:
        """A rank has reported or returned."""
        for restart in list(self._run.restarts):
            self._check(restart, at)

    def time_is_up(self, restart: Restart, what: TimerName, at: float) -> None:
        self._check(restart, at, what)

    def _check(self, restart: Restart, at: float, over: TimerName | None = None) -> None:
        """Whether it still waits for something. ``over``: for this no more."""
        if not restart.awaits:
            return
        restart.awaits -= {over}
        if not self._awaits_report(restart):
            restart.awaits.discard(TimerName.FINISH_REPORT)
        if not restart.awaits:
            self._run.do(c.CancelTimer(TimerName.SETTLE, restart.key))
            self._run.do(c.CancelTimer(TimerName.FINISH_REPORT, restart.key))
            self._stop(restart, at)

    def _awaits_report(self, restart: Restart) -> bool:
        """A replica group that is replaced gets its state from its peers: it needs no checkpoint."""
        return restart.full and any(self._run.groups[g].awaits_report for g in restart.groups)
