"""How a run ends: workers stop, checkpoints under way are waited for, everything is given back."""

from __future__ import annotations

from everstep.control import commands as c, events as e, starting
from everstep.control.run import Ending, Run
from everstep.control.table import Phase
from everstep.failures import Failure

NO_RETRY = "this can't be retried"


def check_finished(run: Run) -> bool:
    """Every rank returned. A group that is being replaced has nobody left to train with, then."""
    if run.phase is not Phase.RUNNING:
        return False
    if any(restart.incident is not None and not restart.incident.charged for restart in run.restarts):
        return False  # that group's failure may yet be one too many
    steady = run.steady()
    if not steady or not all(group.finished for group in steady):
        return False
    _begin(run, c.EndRun(c.Outcome.FINISHED, None, (), "finished"), run.settings.deadlines.stop_grace_s)
    return True


def give_up(run: Run, cause: Failure, failures: tuple[Failure, ...] = (), why: str = NO_RETRY) -> None:
    """A budget is spent, or trying again would not help."""
    _begin(run, c.EndRun(c.Outcome.FAILED, cause, failures or (cause,), why), 0.0)


def refuse(run: Run, cause: Failure) -> None:
    """What was saved can't be kept. A run whose ranks have all returned hasn't finished, then."""
    if run.ending is None:
        give_up(run, cause)
    elif run.ending.end.outcome is c.Outcome.FINISHED:
        run.ending.end = c.EndRun(c.Outcome.FAILED, cause, (cause,), NO_RETRY)


def stop_requested(run: Run, event: e.StopRequested) -> None:
    if run.ending is None:
        grace_s = 0.0 if event.now else run.settings.deadlines.stop_grace_s
        ending = _begin(run, c.EndRun(c.Outcome.STOPPED, None, (), event.kind.value, event.kind), grace_s)
        if event.now:
            del ending.due[e.TimerName.UPLOAD]
    elif event.now and run.ending.due.pop(e.TimerName.UPLOAD, None) is not None:
        _stop_workers(run, run.ending, 0.0)


def stop_at_checkpoint(run: Run, event: e.StopAtCheckpointRequested) -> None:
    until = run.now + run.settings.deadlines.last_checkpoint_s
    run.moving.due.setdefault(e.TimerName.LAST_CHECKPOINT, until)


def stop_now(run: Run) -> None:
    """The last checkpoint is there, or was waited for long enough."""
    run.moving.due.pop(e.TimerName.LAST_CHECKPOINT, None)
    stop_requested(run, e.StopRequested(at=run.now, kind=e.StopKind.USER))


def storage_lost(run: Run, event: e.StorageLost) -> None:
    """A run that is being stopped doesn't wait for storage that is away; one that has finished does."""
    if run.ending is not None and run.ending.end.outcome is not c.Outcome.FINISHED:
        run.ending.due.pop(e.TimerName.UPLOAD, None)


def fenced(run: Run, event: e.LeaseLost) -> None:
    """A fenced driver changes nothing: no stop, no release. The driver with the lease owns all of it."""
    run.phase = Phase.ENDED
    run.restarts.clear()
    run.do(c.EndRun(c.Outcome.FENCED, None, (), event.holder))


def _begin(run: Run, end: c.EndRun, grace_s: float) -> Ending:
    run.ending = ending = Ending(end, {})
    for restart in list(run.restarts):
        run.abandon(restart)
    run.end_standbys()
    run.set_phase(Phase.ENDING)
    if grace_s > 0 and end.outcome is c.Outcome.STOPPED:
        run.ask_to_save(c.AskReason.STOP)
    _stop_workers(run, ending, grace_s)
    ending.due[e.TimerName.UPLOAD] = run.now + grace_s + run.settings.deadlines.final_upload_s
    return ending


def _stop_workers(run: Run, ending: Ending, grace_s: float) -> None:
    """Also those that are stopping already: they get another grace period now."""
    for group in run.groups.values():
        group.stopping.clear()
    run.stop_workers(ending, run.groups, grace_s)


def advance(run: Run) -> None:
    """Once nobody is left to stop and nothing to wait for, everything is given back."""
    ending = run.ending
    # All of them have been told to end: this only asks whether they are gone.
    if ending is None or run.phase is Phase.ENDED or not run.stop_workers(ending, run.groups, 0.0):
        return
    unsaved = run.saved.checkpoints.under_way() or run.uploading(run.groups)
    if unsaved and e.TimerName.UPLOAD in ending.due:
        return
    starting.discard_open(run, run.groups)
    run.release(run.fleet.held)
    run.do(c.RequestCapacity(0))
    run.set_phase(Phase.ENDED)
    run.do(ending.end)
