"""Events about hosts: which there are, which were reserved and prepared, and which are lost."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from everstep.control import commands as c, ending, events as e, moving, recovery, starting
from everstep.control.budgets import BUDGET_OF
from everstep.control.fleet import SliceReservation
from everstep.control.restart import Restart
from everstep.control.run import Ending, Run
from everstep.control.table import Phase
from everstep.failures import Failure, Kind
from everstep.topology.slices import HostId, SliceName


class LostHost(NamedTuple):
    """A host that is gone."""

    host: HostId
    slice: SliceName
    failure: Failure


# ---------------------------------------------------------------------- capacity and reservations


def capacity_changed(run: Run, event: e.CapacityChanged) -> None:
    gone = run.fleet.learn(event.hosts)
    moving.match_notices(run)
    if run.phase is Phase.NEW:
        return
    lost(run, [vanished(run, view.id, view.slice) for view in gone])
    starting.retry_places(run)


def vanished(run: Run, host: HostId, name: SliceName) -> LostHost:
    failure = Failure(Kind.HOST_LOST, run.now, "the engine doesn't list it any more", host=host)
    return LostHost(host, name, failure)


def reserved(run: Run, event: e.Reserved) -> None:
    granted = run.fleet.asked_for.pop(event.reservation, None)
    if granted is not None:  # else it was withdrawn, and its release is on its way
        granted.due.clear()
        run.fleet.held |= granted.slices


def not_reserved(run: Run, event: e.ReservationFailed) -> None:
    if run.fleet.asked_for.pop(event.reservation, None) is not None:
        reservation_failed(run, event.reservation, event.reason)


def reserve_timed_out(run: Run, asked_for: SliceReservation) -> None:
    limit_s = run.settings.deadlines.reserve_s
    reservation_failed(run, asked_for.key, f"not reserved within {limit_s:g} s (Deadlines.reserve_s)")


def reservation_failed(run: Run, reservation: int, reason: str) -> None:
    if reservation in run.moving.standbys:
        moving.drop(run, [reservation])
    for restart in run.restarts:
        if restart.reservation == reservation:
            recovery.place_failed(run, restart, Failure(Kind.RESERVATION, run.now, reason))


# ---------------------------------------------------------------------- hosts that are prepared


def prepared(run: Run, event: e.HostPrepared) -> None:
    if event.host in run.fleet.preparing:  # else it was given back or lost meanwhile
        run.fleet.preparing.discard(event.host)
        run.fleet.prepared.add(event.host)


def unprepared(run: Run, event: e.HostUnprepared) -> None:
    host, failure = event.host, event.failure
    if host not in run.fleet.prepared | run.fleet.preparing or run.over:
        return
    if failure.kind is Kind.LIMIT or (BUDGET_OF[failure.kind] is None and not run.budgets.first_starts.over):
        ending.give_up(run, failure)
        return
    was_prepared = host in run.fleet.prepared
    run.fleet.forget(host)
    moving.host_failed(run, host)
    for restart in run.restarts:
        # Where its template died after its workers did, it is prepared again.
        if restart.stage is Phase.PLACING and host in restart.place.hosts and not was_prepared:
            recovery.place_failed(run, restart, failure)
    groups = [group for group in run.groups.values() if group.left_on(host) - group.returned]
    for group in groups:
        failure = group.judge(failure, group.left_on(host))
    if groups:
        recovery.failed(run, failure, {group.number for group in groups})


def prepare_timed_out(run: Run, owner: Restart | SliceReservation) -> None:
    if isinstance(owner, SliceReservation):
        moving.drop(run, [owner.key])
        return
    late = sorted(owner.place.hosts - run.fleet.prepared)
    for host in late:
        run.fleet.forget(host)
    message = f"host {late[0]} not ready after {run.settings.deadlines.prepare_s:g} s (Deadlines.prepare_s)"
    recovery.place_failed(run, owner, Failure(Kind.START, run.now, message, host=late[0]))


# ---------------------------------------------------------------------- hosts that are lost


def host_lost(run: Run, event: e.HostLost) -> None:
    view = run.fleet.mark_dead(event.host)
    if view is not None:
        lost(run, [LostHost(view.id, view.slice, event.failure)])
        return
    # It was known to be gone, since a list lacked it; now the time is known, too.
    for restart in run.restarts:
        if restart.incident is not None and restart.is_ending:
            restart.incident.date(event.host, event.failure.at)


def unresponsive(run: Run, owner: Restart | Ending) -> None:
    """The workers concerned should be gone. Hosts that don't say so count as lost."""
    concerned = owner.groups if isinstance(owner, Restart) else run.groups
    found = [group for number, group in run.groups.items() if number in concerned]
    for host in sorted({host for group in found for host in group.hosts() if group.left_on(host)}):
        name = next(m.slice for group in found for m in group.members.values() if m.host == host)
        run.fleet.mark_dead(host)
        failure = Failure(Kind.HOST_SILENT, run.now, "did not confirm the end of its workers", host=host)
        lost(run, [LostHost(host, name, failure)])


def lost(run: Run, gone: Collection[LostHost]) -> None:
    """These hosts are gone, and a slice lives and dies as one: all groups in it go with it.

    All hosts that are lost at once are taken in before anything is decided: so no group is placed on the
    next one of them.
    """
    ours = {one.slice for one in gone} & run.fleet.held
    gone = [one._replace(failure=_take_out(run, one)) for one in gone]
    if run.over:
        return
    for one in gone:
        moving.host_failed(run, one.host)
    for one in gone:
        _slice_failed(run, one.slice, one.failure)
    for restart in run.restarts:
        missed = [one for one in gone if one.slice in restart.place.slices]
        if missed and restart.stage is Phase.PLACING:
            # It was about to start there. If the slice was reserved already, that is a failed start.
            had = next((one for one in missed if one.slice in ours), None)
            if had is not None:
                recovery.place_failed(run, restart, had.failure)
            else:
                starting.place(run, restart)


def _take_out(run: Run, one: LostHost) -> Failure:
    """Forget what the run had there: its slice is broken, its snapshots and its workers are gone. Returns the
    failure, which is a preemption if there was a notice.
    """
    run.fleet.forget(one.host)
    if one.slice in run.fleet.held:
        run.fleet.broken.add(one.slice)
        run.do(c.RetireHost(one.host))
    run.saved.snapshots.host_lost(one.host)
    for group in run.groups.values():
        group.gone |= group.ranks_on(one.host)
        run.commit_complete(group, group.book.host_lost(group.ranks_on(one.host)))
    if one.slice in run.fleet.noticed:
        return one.failure.preempted()
    return one.failure


def _slice_failed(run: Run, name: SliceName, failure: Failure) -> None:
    idle = [r for r in run.restarts if not r.is_ending and r.stage is not Phase.STARTING]
    failed = {group.number for group in run.groups.values() if group.trains_in(name)}
    failed -= {g for restart in idle for g in restart.groups}
    if not failed:
        return
    tried = 0
    for restart in idle:
        # Groups that came from this slice go on together, so that together they fill another one.
        if not restart.full and name in restart.before.slices:
            run.abandon(restart)
            failed |= restart.groups
            tried = max(tried, restart.attempts)
    recovery.failed(run, failure, failed, tried)
