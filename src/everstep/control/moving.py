"""Starting workers anew although none has failed: on more hosts, away from slices that go, with new code."""

from __future__ import annotations

from everstep.control import events as e
from everstep.control.failures import Failure, Kind
from everstep.control.recovery import Recovery
from everstep.control.relocation import NEW_CODE
from everstep.control.run import Run
from everstep.control.table import Phase


class Moving:
    def __init__(self, run: Run, recovery: Recovery) -> None:
        self._run = run
        self._recovery = recovery

    def reconsider(self, at: float, just_saved: bool = False) -> None:
        """Something changed while the run trains: is there a better place?"""
        run = self._run
        if run.phase is not Phase.RUNNING:
            return
        run.relocation.reconsider(run.groups, run.restarting, run.taken, at)
        going = run.relocation.leave_now(run.groups, run.restarting, run.taken, at, just_saved)
        if going:
            names = sorted(run.relocation.leaving(run.groups))
            host = min(view.id for view in run.fleet.hosts.values() if view.slice in names)
            message = f"slice {', '.join(names)} is being taken away"
            self._recovery.failed(Failure(Kind.PREEMPTED, at, message, host=host), going, at)

    def place_again(self, at: float) -> None:
        """Who waits for a place, or has lost the one that was planned, looks again."""
        placing = self._recovery.placing
        for restart in self._run.restarts:
            waits = restart.stage is Phase.WAITING
            if waits or (restart.stage is Phase.PLACING and not placing.can_be_had(restart)):
                placing.place(restart, at)

    def change_over(self, reason: str, at: float) -> None:
        """Start all workers anew, if there is a reason."""
        if reason:
            restart = self._recovery.begin([], full=True, incident=None, reason=reason, at=at)
            self._recovery.stop(restart, at)

    def waited_for_boundary(self, at: float) -> None:
        """No checkpoint was committed at which the workers could have changed to new code."""
        if self._run.phase is Phase.RUNNING and self._run.relocation.outdated:
            self.change_over(NEW_CODE, at)

    def noticed(self, event: e.PreemptionNotice) -> None:
        self._run.relocation.notices.noticed(event.host, event.deadline, event.at)
        self.reconsider(event.at)

    def cancelled(self, event: e.NoticeCancelled) -> None:
        if self._run.relocation.notices.host_cancelled(event.host, event.at):
            self.place_again(event.at)
            self.reconsider(event.at)

    def alarm(self, at: float) -> None:
        """A notice means something else now than before."""
        self._run.relocation.notices.alarm(at)
        self.place_again(at)
        self.reconsider(at)
