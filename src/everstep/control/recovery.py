"""From a failure back to training: settle, stop, pause, place, start.

Everything that isn't steady training is a ``Restart`` that moves through these stages, whether it covers
one replica group or every worker. What happens only changes what a restart is about and waits for;
``advance``, after every event, moves each restart on as far as it can go.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.control import commands as c, ending, events as e, starting
from everstep.control.budgets import BUDGET_OF, Budget
from everstep.control.restart import Account, NewPlace, Restart
from everstep.control.run import Ending, Run
from everstep.control.table import Phase
from everstep.failures import Failure, Incident, Kind
from everstep.topology.slices import SliceName
from everstep.wording import named, verb

# ---------------------------------------------------------------------- what fails


def failed(run: Run, failure: Failure, groups: set[int], tried: int = 0) -> None:
    """A failure of these groups: part of an incident that is under way, or a new one.

    ``tried``: how many starts have failed already in the restart that some of them are taken from.
    """
    run.do(c.FailureSeen(run.now, failure))
    if run.over:
        return
    if failure.kind is not Kind.PREEMPTED:
        tried = max(tried, starting.futile_replacements(run, groups))
    for restart in run.restarts:
        if restart.full or restart.groups & groups:
            groups = set() if restart.full else groups - restart.groups
            if restart.is_ending:
                _join_incident(restart, failure)
            elif restart.stage is Phase.STARTING:
                start_failed(run, restart, failure)
            # Else it has no workers: this comes late.
    if not groups:
        return
    together = next((restart for restart in run.restarts if restart.is_ending), None)
    if together is not None:  # groups that fail together are replaced together
        together.attempts += tried
        together.cover([run.groups[g] for g in together.groups | groups], run.epoch)
        starting.forget_unproven(run, groups)
        _join_incident(together, failure)
        return
    full = run.settings.group_size is None or run.moving.outdated
    restart = begin(run, groups, full=full, incident=Incident(failure, run.now), reason=failure.line)
    restart.attempts = tried
    _settle(run, restart, failure)


def _join_incident(restart: Restart, failure: Failure) -> None:
    if restart.incident is None:
        return  # a resize is ending these workers: what they say of each other now costs nothing
    restart.incident.add(failure)
    restart.reason = restart.incident.cause.line
    if restart.settles and not failure.echo:
        restart.due.pop(e.TimerName.SETTLE, None)  # this is the cause


def start_failed(run: Run, restart: Restart, failure: Failure) -> None:
    """A start did not work out: what has started is stopped, and it goes round again, or up the ladder."""
    incident = restart.incident
    if incident is not None and incident.charged and failure.at < restart.account.ordered:
        incident.add(failure)  # it arrives late: it is part of what this restart is for, and paid for
    else:
        restart.incident = Incident(failure, run.now)
    restart.reason = failure.line
    restart.attempts += 1
    restart.stop_waiting()
    run.withdraw(restart.reservation)
    restart.place = NewPlace()
    if restart.stage is Phase.STARTING:
        _settle(run, restart, failure)


def place_failed(run: Run, restart: Restart, failure: Failure) -> None:
    """A start failed before it had workers."""
    failure = failure.while_starting()
    run.do(c.FailureSeen(run.now, failure))
    start_failed(run, restart, failure)


def start_timed_out(run: Run, restart: Restart) -> None:
    late = sorted(rank for g in restart.groups for rank in run.groups[g].ranks - run.groups[g].ready)
    host = next(a.host for a in restart.place.assignments if a.rank == late[0])
    are, limit_s = verb(late, "is", "are"), run.settings.deadlines.start_s
    message = f"{named('rank', late)} {are} not ready {limit_s:g} s after the start (Deadlines.start_s)"
    place_failed(run, restart, Failure(Kind.START, run.now, message, rank=late[0], host=host))


# ---------------------------------------------------------------------- beginning


def begin(
    run: Run, groups: Collection[int], *, full: bool, incident: Incident | None, reason: str
) -> Restart:
    some = Phase.NEW if all(run.groups[g].nowhere for g in groups) else Phase.RUNNING
    stage, account = run.phase if full else some, Account(incident, run.now)
    restart = Restart(run.next_key(), stage, full, incident, reason, account)
    restart.cover([run.groups[g] for g in sorted(run.groups if full else groups)], run.epoch)
    run.restarts.append(restart)
    starting.forget_unproven(run, restart.groups)
    run.end_standbys()
    return restart


def restart_all(run: Run, reason: str) -> None:
    """Start all workers anew, although none has failed."""
    _stop(run, begin(run, [], full=True, incident=None, reason=reason))


def find_places(run: Run) -> None:
    """Groups that have none get one once there is room, and the others never stop for it."""
    together: dict[frozenset[SliceName], set[int]] = {}
    for group in run.groups.values():
        if group.nowhere:
            together.setdefault(frozenset(group.slices()), set()).add(group.number)
    for groups in together.values():
        restart = begin(run, groups, full=False, incident=None, reason="there is room for it now")
        starting.place(run, restart)


def _escalate(run: Run, restart: Restart) -> None:
    """Turn a replacement of some groups into a restart of all workers."""
    incident = restart.incident
    for other in [other for other in run.restarts if other is not restart]:
        run.abandon(other)
        if other.incident is not None and not other.incident.charged:
            if incident is None or incident.charged:
                incident = other.incident
            else:
                incident.failures += other.incident.failures
    restart.incident = incident
    restart.due.clear()
    run.withdraw(restart.reservation)
    restart.full = True
    restart.attempts = 0
    restart.place = NewPlace()
    if incident is not None:
        restart.reason = incident.cause.line
    restart.cover(list(run.groups.values()), run.epoch)
    starting.forget_unproven(run, restart.groups)
    run.end_standbys()
    # The run itself joins the restart now, which until here moved alone.
    restart.account.left(restart.stage, run.now)
    restart.stage = Phase.RUNNING
    _stop(run, restart)


# ---------------------------------------------------------------------- from stage to stage


def advance(run: Run) -> None:
    """What a restart waited for may be there: each moves on as far as it can."""
    while not ending.check_finished(run) and any(_moves_on(run, restart) for restart in run.restarts):
        pass
    starting.report_recovered(run)


def _moves_on(run: Run, restart: Restart) -> bool:
    if restart.waits_for_uploads and not run.uploading(restart.groups):
        stop_waiting_for_uploads(run, restart)
        return True
    if _is_too_much(run, restart):
        _escalate(run, restart)
        return True
    if restart.settles:
        return _has_settled(run, restart)
    match restart.stage:
        case Phase.STOPPING:
            return _has_stopped(run, restart)
        case Phase.BACKOFF if e.TimerName.BACKOFF not in restart.due:
            starting.place(run, restart)
        case Phase.WAITING if not restart.full and _placed_groups(run) < run.settings.groups_min:
            # Fewer groups than the user wants have a place: all wait for more, from the checkpoint.
            restart.incident = None  # it is paid for
            _escalate(run, restart)
        case Phase.PLACING if not restart.place.assignments:  # ``start_failed`` has taken its place away
            _decide(run, restart)
        case Phase.PLACING if starting.is_ready(run, restart):
            starting.start(run, restart)
        case _:
            return False
    return True


def _is_too_much(run: Run, restart: Restart) -> bool:
    """No group is left to go on, or replacing them was tried often enough: everything restarts."""
    tried_enough = restart.attempts >= run.settings.group_attempts
    none_left = restart.is_ending and run.restarting >= run.groups.keys()
    return not restart.full and (tried_enough or none_left)


def _placed_groups(run: Run) -> int:
    """How many replica groups have a place, or are about to get one."""
    waiting = {g for restart in run.restarts if restart.stage is Phase.WAITING for g in restart.groups}
    return len(run.groups.keys() - waiting)


def _settle(run: Run, restart: Restart, failure: Failure) -> None:
    """Before the other workers are ended, wait for the cause, if this looks like an echo of another failure;
    and for a report that the failed rank had made, and healthy ranks are about to make.
    """
    limits, is_start = run.settings.deadlines, restart.stage is Phase.STARTING
    waits = {
        e.TimerName.SETTLE: limits.settle_s if failure.echo and not is_start else 0.0,
        e.TimerName.FINISH_REPORT: limits.finish_report_s if _awaits_report(run, restart) else 0.0,
    }
    restart.settles = any(waits.values())
    # A start that has failed is over, also while a report of those that have started is waited for.
    run.enter_stage(restart, Phase.SETTLING if restart.settles and not is_start else Phase.STOPPING)
    restart.due.update((timer, run.now + seconds) for timer, seconds in waits.items() if seconds)
    if not restart.settles:
        _stop(run, restart)


def _awaits_report(run: Run, restart: Restart) -> bool:
    """A replica group that is replaced gets its state from its peers: it needs no checkpoint."""
    return restart.full and any(run.groups[g].awaits_report for g in restart.groups)


def _has_settled(run: Run, restart: Restart) -> bool:
    if not _awaits_report(run, restart):
        restart.due.pop(e.TimerName.FINISH_REPORT, None)
    if restart.due.keys() & {e.TimerName.SETTLE, e.TimerName.FINISH_REPORT}:
        return False
    _stop(run, restart)
    return True


def _stop(run: Run, restart: Restart) -> None:
    """Its workers are ended from now on. For a while, other groups that fail belong to the same incident."""
    restart.settles = False
    run.enter_stage(restart, Phase.STOPPING)
    if restart.incident is not None and not restart.full:
        together = restart.incident.seen + run.settings.deadlines.together_s
        if run.now < together:
            restart.due[e.TimerName.SETTLE] = together


def _has_stopped(run: Run, restart: Restart) -> bool:
    if not run.stop_workers(restart, restart.groups, 0.0) or e.TimerName.SETTLE in restart.due:
        return False
    # A replica group that is replaced gets its state from its peers: for that no upload is waited for.
    groups = [run.groups[number] for number in restart.groups if restart.full]
    uploads = [(run.incarnation(g), index) for g in groups for index in g.book.lacking_uploads()]
    worth = run.saved.worth_waiting_s(uploads) if restart.full else 0.0
    restart.due.clear()
    if worth > 0 and run.uploading(restart.groups):
        restart.due[e.TimerName.UPLOAD] = run.now + min(worth, run.settings.deadlines.upload_wait_s)
    _decide(run, restart)
    return True


def stop_waiting_for_uploads(run: Run, owner: Restart | Ending) -> None:
    owner.due.pop(e.TimerName.UPLOAD, None)
    if isinstance(owner, Restart) and owner.stage is Phase.WAITING:
        starting.place(run, owner)  # which gives back the slices that were kept for it


# ---------------------------------------------------------------------- what it costs


def _decide(run: Run, restart: Restart) -> None:
    """The workers concerned are gone: charge the incident, then pause, place, or give up."""
    incident, pause = restart.incident, 0.0
    if incident is not None:
        budget, is_paid = _budget_of(run, restart, incident.cause), incident.charged
        if budget is Budget.REPLICAS and not is_paid and not run.budgets.left(budget):
            _escalate(run, restart)
            return
        why_not = None if is_paid else _charge(run, incident.cause, budget)
        if why_not is not None:
            ending.give_up(run, incident.cause, tuple(incident.failures), why_not)
            return
        incident.charged = True
        # A slice that is taken away says nothing about the next one.
        if incident.cause.kind is not Kind.PREEMPTED:
            pause = run.budgets.backoff.next_pause(run.now)
        if not is_paid and budget is not None:
            _tell(run, restart, incident.cause, budget, pause)
    if pause > 0:
        run.enter_stage(restart, Phase.BACKOFF)
        restart.due[e.TimerName.BACKOFF] = run.now + pause
    else:
        starting.place(run, restart)


def _budget_of(run: Run, restart: Restart, cause: Failure) -> Budget | None:
    """Replacing groups spends a budget of its own, if there is one."""
    budget = BUDGET_OF[cause.kind]
    own = not restart.full and run.settings.max_replica_failures is not None
    return Budget.REPLICAS if own and budget is Budget.FAILURES else budget


def _charge(run: Run, cause: Failure, budget: Budget | None) -> str | None:
    """Why the run can't go on, if this was one too many."""
    budgets = run.budgets
    if budget is None:
        return ending.NO_RETRY
    if cause.kind is Kind.START and budgets.first_starts.failed(cause):
        return f"the start failed {budgets.first_starts.limit} times in the same way, and nothing was trained"
    if not budgets.spend(budget):
        limit = budgets.limits[budget]
        return f"{budget.value}={limit} is used up" if limit else f"no restart allowed ({budget.value}=0)"
    until = run.fleet.suspects.suspect(cause, run.now)
    if until is not None and cause.host is not None:
        run.do(c.HostSetAside(run.now, cause.host, until))
    return None


def _tell(run: Run, restart: Restart, cause: Failure, budget: Budget, pause: float) -> None:
    budgets, groups, unsaved = run.budgets, tuple(sorted(restart.groups)), 0
    if restart.full:
        groups = ()
    elif not budgets.warned_unsaved and run.saved.checkpoints.newest is None:
        others = [g for g in run.groups.values() if g.number not in restart.groups]
        unsaved = max((g.book.furthest for g in others), default=0)
        budgets.warned_unsaved = bool(unsaved)
    spent, limit = budgets.spent[budget], budgets.limits[budget]
    run.do(c.RecoveryDecided(run.now, cause, budget, spent, limit, groups, pause, unsaved))
