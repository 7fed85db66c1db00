"""What is told of the cluster: which hosts there are, what was reserved and prepared, and what is lost."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.ending import Ending
from everstep.control.failures import BUDGET_OF, Failure, Kind
from everstep.control.moving import Moving
from everstep.control.recovery import Recovery, while_starting
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.table import Phase
from everstep.topology.slices import HostId, SliceName


class Lost(NamedTuple):
    """A host that is gone."""

    host: HostId
    slice: SliceName
    failure: Failure
    held: bool = False
    """Its slice was ours."""


class Hosts:
    def __init__(self, run: Run, recovery: Recovery, moving: Moving, ending: Ending) -> None:
        self._run = run
        self._recovery = recovery
        self._moving = moving
        self._ending = ending

    # ------------------------------------------------------------------ capacity and reservations

    def changed(self, event: e.CapacityChanged) -> None:
        run, at = self._run, event.at
        lost = run.fleet.learn(event.hosts)
        run.relocation.notices.listed(at)
        if run.phase is Phase.NEW:
            return
        self.lost([Lost(view.id, view.slice, unlisted(view.id, at)) for view in lost], at)
        if not run.over:
            self._moving.place_again(at)
            self._moving.reconsider(at)

    def reserved(self, event: e.Reserved) -> None:
        run = self._run
        if event.reservation in run.relocation.standbys:
            run.relocation.granted(event.reservation, event.at)
        elif run.fleet.granted(event.reservation):
            for restart in run.restarts:
                if restart.reservation == event.reservation:
                    self._recovery.placing.granted(restart, event.at)

    def not_reserved(self, event: e.ReservationFailed) -> None:
        self._run.fleet.refused(event.reservation)
        self.reservation_failed(event.reservation, event.reason, event.at)

    def reservation_failed(self, reservation: int, reason: str, at: float) -> None:
        run = self._run
        if reservation in run.relocation.standbys:
            run.relocation.failed(reservation, at)
            return
        for restart in run.each_restart():
            if restart.reservation == reservation:
                self._recovery.place_failed(restart, Failure(Kind.RESERVATION, at, reason), at)

    # ------------------------------------------------------------------ hosts that are prepared

    def prepared(self, event: e.HostPrepared) -> None:
        run = self._run
        if event.host not in run.fleet.preparing:
            return  # given back or lost meanwhile
        run.fleet.preparing.discard(event.host)
        run.fleet.prepared.add(event.host)
        if run.relocation.check_ready():
            self._moving.reconsider(event.at)

    def unprepared(self, event: e.HostUnprepared) -> None:
        run, failure = self._run, event.failure
        if event.host not in run.fleet.prepared | run.fleet.preparing or run.over:
            return
        if failure.kind is Kind.LIMIT or (BUDGET_OF[failure.kind] is None and not run.trained):
            self._ending.give_up(failure, (failure,), event.at)
        else:
            self._unprepared(event.host, failure, event.at)

    def _unprepared(self, host: HostId, failure: Failure, at: float) -> None:
        run = self._run
        was_prepared = host in run.fleet.prepared
        run.fleet.forget(host)
        run.relocation.host_failed(host, at)
        for restart in run.each_restart():
            if restart.stage is not Phase.PLACING or host not in restart.place.hosts:
                continue
            if was_prepared:
                self._recovery.placing.prepare_again(restart, at)  # its template died after its workers did
            else:
                self._recovery.place_failed(restart, while_starting(failure), at)
        groups = {group.number for group in run.groups.values() if group.left_on(host) - group.returned}
        if groups:
            starting = any(not run.groups[g].left_on(host) <= run.groups[g].ready for g in groups)
            self._recovery.failed(while_starting(failure) if starting else failure, groups, at)

    def prepare_timed_out(self, restart: Restart, at: float) -> None:
        run = self._run
        late = sorted(restart.place.hosts - run.fleet.prepared)
        if not late:
            return
        limit = run.settings.deadlines.prepare_s
        message = f"host {late[0]} not ready after {limit:g} s (Deadlines.prepare_s)"
        for host in late:
            run.fleet.forget(host)
        failure = Failure(Kind.START, at, message, host=late[0])
        self._recovery.place_failed(restart, failure, at)

    # ------------------------------------------------------------------ hosts that are lost

    def lost_one(self, event: e.HostLost) -> None:
        view = self._run.fleet.lose(event.host)
        if view is not None:
            self.lost([Lost(view.id, view.slice, event.failure)], event.at)
            return
        # That it is gone was known, from its absence in a list; now it is known since when.
        for restart in self._run.restarts:
            if restart.incident is not None and restart.stage in (Phase.SETTLING, Phase.STOPPING):
                restart.incident.date(event.host, event.failure.at)

    def unresponsive(self, host: HostId, at: float) -> None:
        """Its workers should be gone, and it doesn't say so: it counts as lost."""
        run = self._run
        run.fleet.lose(host)
        places = (member for group in run.groups.values() for member in group.members.values())
        name = next(member.slice for member in places if member.host == host)
        failure = Failure(Kind.HOST_SILENT, at, "did not confirm the end of its workers", host=host)
        self.lost([Lost(host, name, failure)], at)

    def lost(self, lost: Collection[Lost], at: float) -> None:
        """These hosts are gone, and a slice lives and dies as one: all groups in it go with it.

        What is lost at once is taken in whole before anything is decided: nobody is placed where the next
        one of them was.
        """
        run = self._run
        if run.phase is Phase.ENDED:
            return
        lost = [self._forget(one) for one in lost]
        if run.over:
            for one in lost:
                self._ending.gone(one.host, None)
            return
        for one in lost:
            run.relocation.host_failed(one.host, at)
            for restart in run.restarts:
                restart.stopping.pop(one.host, None)
        for one in lost:
            self._slice_failed(one.slice, one.failure, at)
        for restart in run.each_restart():
            missed = [one for one in lost if one.slice in restart.place.slices]
            if missed and restart.stage is Phase.PLACING:
                self._place_lost(restart, missed, at)

    def _forget(self, one: Lost) -> Lost:
        """Its workers are gone. Returns it with what is known of it besides."""
        run = self._run
        held = one.slice in run.fleet.held
        run.fleet.forget(one.host)
        if held:
            run.fleet.broken.add(one.slice)
            run.do(c.RetireHost(one.host))
        failure = one.failure
        if one.slice in run.fleet.noticed:
            failure = msgspec.structs.replace(failure, kind=Kind.PREEMPTED)
        run.snapshots.host_lost(one.host)
        for group in run.groups.values():
            group.gone |= group.ranks_on(one.host)
            run.settle(group, group.book.host_lost(group.ranks_on(one.host)))
        return Lost(one.host, one.slice, failure, held)

    def _slice_failed(self, name: SliceName, failure: Failure, at: float) -> None:
        run = self._run
        idle = [restart for restart in run.restarts if not restart.has_workers]
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
        self._recovery.failed(failure, failed, at, tried)

    def _place_lost(self, restart: Restart, missed: Collection[Lost], at: float) -> None:
        """It was about to start there. What was ours already costs a failed start."""
        had = next((one for one in missed if one.held), None)
        if had is not None:
            self._recovery.place_failed(restart, while_starting(had.failure), at)
        else:
            self._recovery.placing.place(restart, at)


def unlisted(host: HostId, at: float) -> Failure:
    return Failure(Kind.HOST_LOST, at, "the engine doesn't list it any more", host=host)
