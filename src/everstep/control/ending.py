"""How a run ends: workers stop, checkpoints under way are waited for, everything is given back."""

from __future__ import annotations

from everstep.control import commands as c
from everstep.control.commands import Outcome
from everstep.control.events import StopRequested, TimerName
from everstep.control.failures import Failure
from everstep.control.run import Run
from everstep.control.table import Phase
from everstep.topology.slices import HostId

_OWN_TIMERS = (TimerName.KILL, TimerName.UPLOAD, TimerName.GROW, TimerName.MIGRATE, TimerName.BOUNDARY)

_NO_RETRY = "this can't be retried"


class Ending:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._end: c.EndRun | None = None
        self._hosts: dict[HostId, frozenset[int]] = {}
        """Ranks to be gone, by host."""
        self._at_once = False
        """Checkpoints are not waited for any more."""

    @property
    def hosts(self) -> list[HostId]:
        """Those that have not confirmed the end of their workers."""
        return sorted(self._hosts)

    # ------------------------------------------------------------------ why it ends

    def check_finished(self, at: float) -> None:
        """Every rank returned. A group that is being replaced has nobody left to train with, then."""
        run = self._run
        if run.phase is not Phase.RUNNING:
            return
        if any(restart.incident is not None and not restart.incident.charged for restart in run.restarts):
            return  # that group's failure may yet be one too many
        rest = [g for g in run.groups.values() if g.number not in run.restarting and not g.nowhere]
        if rest and all(group.finished for group in rest):
            end = c.EndRun(Outcome.FINISHED, None, (), "finished")
            self._begin(end, run.settings.deadlines.stop_grace_s, at)

    def give_up(
        self,
        cause: Failure,
        failures: tuple[Failure, ...],
        at: float,
        why: str = _NO_RETRY,
    ) -> None:
        """A budget is spent, or trying again would not help."""
        self._begin(c.EndRun(Outcome.FAILED, cause, failures, why), 0.0, at)

    def refuse(self, cause: Failure, at: float) -> None:
        """What was saved can't be kept. A run whose ranks have all returned hasn't finished, then."""
        if self._end is None:
            self.give_up(cause, (cause,), at)
        elif self._end.outcome is Outcome.FINISHED:
            self._end = c.EndRun(Outcome.FAILED, cause, (cause,), _NO_RETRY)

    def stop_requested(self, event: StopRequested) -> None:
        if self._end is None:
            self._at_once = event.now
            grace = 0.0 if event.now else self._run.settings.deadlines.stop_grace_s
            end = c.EndRun(Outcome.STOPPED, None, (), event.kind.value, event.kind)
            self._begin(end, grace, event.at)
        elif event.now and not self._at_once:
            self._at_once = True
            self._stop_workers(0.0, event.at)

    # ------------------------------------------------------------------ what is done

    def _begin(self, end: c.EndRun, grace_s: float, at: float) -> None:
        run = self._run
        self._end = end
        for restart in list(run.restarts):
            run.abandon(restart)
        run.relocation.absorb()
        run.set_phase(Phase.ENDING, at)
        if grace_s > 0 and end.outcome is Outcome.STOPPED:
            run.relocation.ask_for_the_end()
        self._stop_workers(grace_s, at)
        limit = at + grace_s + run.settings.deadlines.final_upload_s
        run.do(c.SetTimer(TimerName.UPLOAD, 0, limit))

    def _stop_workers(self, grace_s: float, at: float) -> None:
        run = self._run
        self._hosts = {}
        for _, group in sorted(run.groups.items()):
            for host in sorted(group.hosts()):
                left = group.left_on(host)
                if left:
                    self._hosts[host] = self._hosts.get(host, frozenset()) | left
                    run.do(c.StopWorkers(host, run.epoch, left, grace_s, group.generation))
        if self._hosts:
            limit = at + grace_s + run.settings.deadlines.kill_s
            run.do(c.SetTimer(TimerName.KILL, 0, limit))

    def gone(self, host: HostId, ranks: set[int] | None) -> None:
        """These ranks have ended; None: the host is lost, and all of its ranks with it."""
        left = self._hosts.pop(host, frozenset()) - (ranks or set())
        if left and ranks is not None:
            self._hosts[host] = left

    def storage_lost(self) -> None:
        """Nobody who stops a run waits for storage that is away. A run that has finished does."""
        if self._end is not None and self._end.outcome is not Outcome.FINISHED:
            self._at_once = True

    def uploads_took_too_long(self) -> None:
        self._at_once = True

    def advance(self, at: float) -> None:
        """Once nobody is left to stop and nothing to wait for, everything is given back."""
        run = self._run
        if run.phase is not Phase.ENDING or self._hosts:
            return
        unsaved = run.checkpoints.under_way() or any(run.uploading(group) for group in run.groups.values())
        if unsaved and not self._at_once:
            return
        assert self._end is not None
        for group in run.groups.values():
            run.discard_open(group)
        run.fleet.release(run.fleet.held)
        for timer in _OWN_TIMERS:
            run.do(c.CancelTimer(timer, 0))
        run.do(c.RequestCapacity(0))
        run.set_phase(Phase.ENDED, at)
        run.do(self._end)
