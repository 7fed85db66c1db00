"""Getting the place for a restart: whole slices, reserved, with every host prepared and every checkpoint
dealt with.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.control import commands as c
from everstep.control.events import TimerName
from everstep.control.restart import NewPlace, Restart
from everstep.control.run import Run
from everstep.control.table import Phase
from everstep.topology.placement import Assignment, assign_ranks
from everstep.topology.slices import SliceName


class Placing:
    def __init__(self, run: Run) -> None:
        self._run = run

    def place(self, restart: Restart, at: float) -> None:
        """Find hosts, reserve what isn't held, prepare what isn't ready.

        Called again whenever capacity changed.
        """
        run = self._run
        run.withdraw(restart)
        restart.place = NewPlace()
        self._release_unused(restart, run.fleet.broken)
        restart.place = NewPlace(self._assign_all(at) if restart.full else self._assign_again(restart, at))
        self._release_unused(restart, run.fleet.held)
        if not restart.place.assignments:
            if restart.stage is not Phase.WAITING:
                run.stage(restart, Phase.WAITING, at)
                self.say_shortage(restart, at)
            return
        run.do(c.CancelTimer(TimerName.SAY_SHORTAGE, restart.key))
        run.stage(restart, Phase.PLACING, at)
        missing = restart.place.slices - run.fleet.held
        if missing:
            restart.reservation = run.next_key()
            run.fleet.reserve(restart.reservation, missing, at)
            self.prepare_again(restart, at)
        else:
            self._prepare(restart, at)

    def granted(self, restart: Restart, at: float) -> None:
        restart.reservation = None
        self._prepare(restart, at)

    def _prepare(self, restart: Restart, at: float) -> None:
        self._run.fleet.prepare(restart.place.hosts)
        self._await_hosts(restart, at)

    def prepare_again(self, restart: Restart, at: float) -> None:
        """Those of its hosts that are held, and have not been told to."""
        if self._run.fleet.prepare(restart.place.hosts):
            self._await_hosts(restart, at)

    def is_ready(self, restart: Restart) -> bool:
        """Its workers can start: every host is there, and every commit is answered, so that the newest
        checkpoint is known.
        """
        run, place = self._run, restart.place
        return (
            restart.reservation is None
            and run.fleet.preparing.isdisjoint(place.hosts)
            and place.hosts <= run.fleet.prepared
            and place.slices <= run.fleet.held
            and not run.checkpoints.under_way(None if restart.full else restart.groups)
            and not restart.waits_for_uploads
        )

    def can_be_had(self, restart: Restart) -> bool:
        """What is planned is still there, and still free."""
        fleet = self._run.fleet
        return fleet.is_whole(fleet.asks_for(restart.reservation)) and all(
            map(fleet.alive, restart.place.hosts)
        )

    def _await_hosts(self, restart: Restart, at: float) -> None:
        run = self._run
        run.do(c.SetTimer(TimerName.PREPARE, restart.key, at + run.settings.deadlines.prepare_s))

    def _assign_all(self, at: float) -> tuple[Assignment, ...]:
        placement = self._run.fleet.place_all(at)
        settings = self._run.settings
        return assign_ranks(placement, settings.group_size, settings.workers_max) if placement else ()

    def _assign_again(self, restart: Restart, at: float) -> tuple[Assignment, ...]:
        run = self._run
        everyone = [a for group in run.groups.values() for a in group.members.values()]
        moving = [a for g in sorted(restart.groups) for a in run.groups[g].members.values()]
        return run.fleet.place_again(moving, everyone, run.used_by_others(restart), at)

    def _release_unused(self, restart: Restart, slices: Collection[SliceName]) -> None:
        """Give back those of these slices that nobody uses, and nothing is being uploaded from."""
        run = self._run
        uploading = run.uploading_hosts(restart) if restart.waits_for_uploads else frozenset()
        busy = {host.slice for host in run.fleet.hosts.values() if host.id in uploading}
        run.fleet.release(set(slices) - run.used_by_others(restart) - restart.place.slices - busy)

    def say_shortage(self, restart: Restart, at: float) -> None:
        run = self._run
        if restart.full:
            message = f"need room for at least {run.settings.start_min} workers; {run.fleet.shortage()}"
        else:
            groups = ", ".join(map(str, sorted(restart.groups)))
            message = (
                f"need room for replica groups {groups}; {run.fleet.shortage(run.used_by_others(restart))}"
            )
        run.do(c.Waiting(at, run.settings.start_min, message))
        run.do(c.SetTimer(TimerName.SAY_SHORTAGE, restart.key, at + run.settings.deadlines.capacity_log_s))
