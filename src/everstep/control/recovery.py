"""From a failure back to training: settle, stop, pause, place, start.

Everything that isn't steady training is a ``Restart`` that moves through these stages, whether it covers
one replica group or every worker. What happens only changes what a restart waits for; ``advance``, after
every event, moves each restart on as far as it can go. Which rung of the ladder that was is read off the
result (same hosts, other hosts, fewer), not chosen by a ladder of conditions.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from everstep.control import commands as c
from everstep.control.budgets import Backoff
from everstep.control.charges import Charges
from everstep.control.ending import Ending
from everstep.control.events import TimerName
from everstep.control.failures import Failure, Incident, Kind
from everstep.control.group import Group
from everstep.control.placing import Placing
from everstep.control.restart import NewPlace, Restart
from everstep.control.run import Run
from everstep.control.starting import Starting
from everstep.control.table import Phase
from everstep.topology.slices import SliceName


class Recovery:
    def __init__(self, run: Run, ending: Ending) -> None:
        self._run = run
        self._ending = ending
        self._backoff = Backoff(run.settings.deadlines)
        self._charges = Charges(run, ending)
        self.placing = Placing(run)
        self.starting = Starting(run)

    # ------------------------------------------------------------------ what fails

    def failed(self, failure: Failure, groups: set[int], at: float, tried: int = 0) -> None:
        """A failure of these groups: part of an incident that is under way, or a new one.

        ``tried``: how many starts have failed already in what some of them are taken from.
        """
        run = self._run
        run.do(c.FailureSeen(at, failure))
        if run.over:
            return
        if failure.kind is not Kind.PREEMPTED:
            since = at - run.settings.deadlines.healthy_s
            tried = max(tried, self.starting.in_vain(groups, since))
        for restart in run.each_restart():
            if not (restart.full or restart.groups & groups):
                continue
            groups = set() if restart.full else groups - restart.groups
            match restart.stage:
                case Phase.SETTLING | Phase.STOPPING:
                    self._join_incident(restart, failure)
                case Phase.STARTING:
                    self.start_failed(restart, failure, at)
                case _:
                    pass  # it has no workers: the word is late
        if not groups or run.over or any(restart.full for restart in run.restarts):
            return
        for restart in run.restarts:
            if restart.stage in (Phase.SETTLING, Phase.STOPPING):
                restart.attempts += tried
                self._widen(restart, groups, failure, at)
                return
        full = run.settings.group_size is None or run.relocation.outdated
        restart = self.begin(groups, full=full, incident=Incident(failure, at), reason=_why(failure), at=at)
        restart.attempts = tried
        if self._is_too_much(restart):
            self._escalate(restart, at)
        else:
            self._settle(restart, failure, at)

    def _is_too_much(self, restart: Restart) -> bool:
        """No group is left to go on, or replacing them was tried often enough: everything restarts."""
        tried_enough = restart.attempts >= self._run.settings.group_attempts
        return not restart.full and (tried_enough or self._run.restarting >= set(self._run.groups))

    def _widen(self, restart: Restart, groups: set[int], failure: Failure, at: float) -> None:
        """Groups that fail together are replaced together."""
        run = self._run
        restart.cover([run.groups[g] for g in restart.groups | groups], run.epoch)
        self.starting.forget(groups)
        if restart.incident is not None and self._is_too_much(restart):
            restart.incident.add(failure)
            self._escalate(restart, at)
            return
        self._join_incident(restart, failure)
        if restart.stage is Phase.STOPPING:
            self._stop_workers(restart, at)

    def _join_incident(self, restart: Restart, failure: Failure) -> None:
        if restart.incident is None:
            return  # a resize is ending these workers: what they say of each other now costs nothing
        restart.incident.add(failure)
        restart.reason = _why(restart.incident.cause)
        if not failure.echo:
            restart.stop_waiting_for(TimerName.SETTLE)  # this is the cause

    def _escalate(self, restart: Restart, at: float) -> None:
        """Turn a replacement of some groups into a restart of all workers."""
        run = self._run
        incident = restart.incident
        for other in [other for other in run.restarts if other is not restart]:
            run.abandon(other)
            if other.incident is not None and not other.incident.charged:
                if incident is None or incident.charged:
                    incident = other.incident
                else:
                    incident.failures += other.incident.failures
        restart.incident = incident
        run.cancel_timers(restart)
        run.withdraw(restart)
        restart.full = True
        restart.attempts = 0
        restart.place = NewPlace()
        if incident is not None:
            restart.reason = _why(incident.cause)
        restart.cover(list(run.groups.values()), run.epoch)
        self.starting.forget(restart.groups)
        run.relocation.absorb()
        run.relocation.ask_nothing()
        # The run itself joins the restart now, which until here moved alone.
        restart.stage = Phase.RUNNING
        self.stop(restart, at)

    def start_failed(self, restart: Restart, failure: Failure, at: float) -> None:
        """A start did not work out: stop what has started, and go round again, or up the ladder."""
        run = self._run
        if restart.incident is not None and restart.incident.charged and failure.at < restart.account.ordered:
            restart.incident.add(failure)  # told late: it is part of what this restart is for, and paid for
        else:
            restart.incident = Incident(failure, at)
        restart.reason = _why(failure)
        restart.attempts += 1
        run.cancel_timers(restart, but=TimerName.UPLOAD)
        run.withdraw(restart)
        if not restart.full and restart.attempts >= run.settings.group_attempts:
            self._escalate(restart, at)
        elif restart.stage is Phase.STARTING:
            self._settle(restart, failure, at)
        else:
            self._decide(restart, at)

    def place_failed(self, restart: Restart, failure: Failure, at: float) -> None:
        """The same, before there were workers to speak of it."""
        self._run.do(c.FailureSeen(at, failure))
        self.start_failed(restart, failure, at)

    # ------------------------------------------------------------------ from stage to stage

    def advance(self, at: float) -> None:
        """What a restart waited for may be there: each moves on as far as it can."""
        while any(self._moves_on(restart, at) for restart in self._run.restarts):
            pass
        self.starting.tell_recovered(at)

    def _moves_on(self, restart: Restart, at: float) -> bool:
        run = self._run
        if restart.waits_for_uploads and not run.uploading_hosts(restart):
            self.stop_waiting_for_uploads(restart, at)
            return True
        if restart.awaits is not None:
            return self._has_settled(restart, at)
        match restart.stage:
            case Phase.STOPPING:
                return self._has_stopped(restart, at)
            case Phase.WAITING if not restart.full and run.placed_groups() < run.settings.groups_min:
                # Fewer groups than the user wants have a place: all wait for more, from the checkpoint.
                restart.incident = None  # it is paid for
                self._escalate(restart, at)
                return True
            case Phase.PLACING if self.placing.is_ready(restart):
                self.starting.start(restart, at)
                return True
        return False

    def begin(
        self, groups: Collection[int], *, full: bool, incident: Incident | None, reason: str, at: float
    ) -> Restart:
        run = self._run
        some = Phase.NEW if all(run.groups[g].nowhere for g in groups) else Phase.RUNNING
        stage = run.phase if full else some
        restart = Restart(run.next_key(), stage=stage, full=full, incident=incident, reason=reason, began=at)
        restart.cover([run.groups[g] for g in sorted(run.groups if full else groups)], run.epoch)
        run.restarts.append(restart)
        self.starting.forget(restart.groups)
        run.relocation.absorb()
        if full:
            run.relocation.ask_nothing()
        return restart

    def _settle(self, restart: Restart, failure: Failure, at: float) -> None:
        """Before the other workers are ended, wait for the cause, if this looks like an echo of another
        failure; and for a report that the failed rank had made, and healthy ranks are about to make.
        """
        run, limits = self._run, self._run.settings.deadlines
        starting = restart.stage is Phase.STARTING
        waits = {
            TimerName.SETTLE: limits.settle_s if failure.echo and not starting else 0.0,
            TimerName.FINISH_REPORT: limits.finish_report_s if self._awaits_report(restart) else 0.0,
        }
        restart.awaits = {timer for timer, seconds in waits.items() if seconds > 0}
        if not restart.awaits:
            self.stop(restart, at)
            return
        # A start that has failed is over, also while a report of those that have started is waited for.
        run.stage(restart, Phase.STOPPING if starting else Phase.SETTLING, at)
        for timer in sorted(restart.awaits):
            run.do(c.SetTimer(timer, restart.key, at + waits[timer]))

    def _awaits_report(self, restart: Restart) -> bool:
        """A replica group that is replaced gets its state from its peers: it needs no checkpoint."""
        return restart.full and any(self._run.groups[g].awaits_report for g in restart.groups)

    def _has_settled(self, restart: Restart, at: float) -> bool:
        if not self._awaits_report(restart):
            restart.stop_waiting_for(TimerName.FINISH_REPORT)
        if restart.awaits:
            return False
        self._run.do(c.CancelTimer(TimerName.SETTLE, restart.key))
        self._run.do(c.CancelTimer(TimerName.FINISH_REPORT, restart.key))
        self.stop(restart, at)
        return True

    def stop(self, restart: Restart, at: float) -> None:
        restart.awaits = None
        self._run.stage(restart, Phase.STOPPING, at)
        if at < self._together(restart):
            self._run.do(c.SetTimer(TimerName.SETTLE, restart.key, self._together(restart)))
        self._stop_workers(restart, at)

    def _together(self, restart: Restart) -> float:
        """Until when other groups that fail belong to the same incident."""
        if restart.full or restart.incident is None:
            return -math.inf
        return restart.incident.seen + self._run.settings.deadlines.together_s

    def _stop_workers(self, restart: Restart, at: float) -> None:
        """Kill every worker of the restart's groups that may still run, and wait for the word that it is
        gone.
        """
        run = self._run
        for group in [run.groups[g] for g in sorted(restart.groups)]:
            for host in sorted(group.hosts()):
                told = restart.stopping.get(host, frozenset())
                left = group.left_on(host) - told
                if left:
                    restart.stopping[host] = told | left
                    run.do(c.StopWorkers(host, run.epoch, left, 0.0, group.generation))
        if restart.stopping:
            run.do(c.SetTimer(TimerName.KILL, restart.key, at + run.settings.deadlines.kill_s))

    def _has_stopped(self, restart: Restart, at: float) -> bool:
        if restart.stopping or at < self._together(restart):
            return False
        run = self._run
        run.do(c.CancelTimer(TimerName.KILL, restart.key))
        # A replica group that is replaced gets its state from its peers: for that no upload is waited for.
        worth = run.worth_of_uploads(restart) if restart.full else 0.0
        restart.waits_for_uploads = worth > 0 and bool(run.uploading_hosts(restart))
        if restart.waits_for_uploads:
            limit_s = min(worth, run.settings.deadlines.upload_wait_s)
            run.do(c.SetTimer(TimerName.UPLOAD, restart.key, at + limit_s))
        self._decide(restart, at)
        return True

    def stop_waiting_for_uploads(self, restart: Restart, at: float) -> None:
        restart.waits_for_uploads = False
        self._run.do(c.CancelTimer(TimerName.UPLOAD, restart.key))
        if restart.stage is Phase.WAITING:
            self.placing.place(restart, at)  # which gives back the slices that were kept for it

    def _decide(self, restart: Restart, at: float) -> None:
        """The workers concerned are gone: charge the incident, then pause, place, or give up."""
        run, incident = self._run, restart.incident
        pause = 0.0
        if incident is not None:
            paid = incident.charged
            if not paid and not self._charges.affords(restart, incident):
                self._escalate(restart, at)
                return
            if not paid and not self._charges.charge(restart, incident, at):
                return
            # A slice that is taken away says nothing about the next one.
            if incident.cause.kind is not Kind.PREEMPTED:
                pause = self._backoff.next_pause(at)
            if not paid:
                self._charges.tell(restart, incident.cause, pause, at)
            self._ending.check_finished(at)
            if run.over:
                return
        if pause > 0:
            run.stage(restart, Phase.BACKOFF, at)
            run.do(c.SetTimer(TimerName.BACKOFF, restart.key, at + pause))
        else:
            self.placing.place(restart, at)

    # ------------------------------------------------------------------ back to training

    def progressed(self) -> None:
        self._backoff.progressed()

    def ready(self, group: Group, rank: int, at: float) -> bool:
        """Whether that was the last worker of its start to be ready."""
        restart = self.starting.ready(group, rank, at)
        if restart is None:
            return False
        self._backoff.healthy(at)
        if restart.full:
            self.find_places(at)
        return True

    def find_places(self, at: float) -> None:
        """Groups that have none get one once there is room, and the others never stop for it."""
        run = self._run
        together: dict[frozenset[SliceName], set[int]] = {}
        for group in run.groups.values():
            if group.nowhere:
                together.setdefault(frozenset(group.slices()), set()).add(group.number)
        for groups in together.values():
            restart = self.begin(groups, full=False, incident=None, reason="there is room for it now", at=at)
            self.placing.place(restart, at)

    def start_timed_out(self, restart: Restart, at: float) -> None:
        run = self._run
        late = sorted(rank for g in restart.groups for rank in run.groups[g].ranks - run.groups[g].ready)
        place = next(a for a in restart.place.assignments if a.rank == late[0])
        message = (
            f"ranks {', '.join(map(str, late))} not ready {run.settings.deadlines.start_s:g} s "
            "after the start (Deadlines.start_s)"
        )
        self.place_failed(restart, Failure(Kind.START, at, message, rank=late[0], host=place.host), at)


def while_starting(failure: Failure) -> Failure:
    """What fails before training begins spends the budget for starts, whatever it was."""
    if failure.kind in (Kind.START, Kind.RESERVATION, Kind.PREEMPTED):
        return failure
    message = f"{failure.kind.value} before training began: {failure.message}"
    return msgspec.structs.replace(failure, kind=Kind.START, message=message)


def _why(failure: Failure) -> str:
    if failure.rank is not None:
        return f"rank {failure.rank}: {failure.message}"
    return f"host {failure.host}: {failure.message}" if failure.host else failure.message
