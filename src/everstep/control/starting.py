"""From a place that is ready to workers that train: ordered, spawned, ready, and the first step of each."""

from __future__ import annotations

from everstep.control import commands as c
from everstep.control.commands import Rung
from everstep.control.events import TimerName
from everstep.control.group import Group
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.table import Phase


class Starting:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._awaiting_step: list[Restart] = []
        """Started, and not every rank has reported since."""

    def start(self, restart: Restart, at: float) -> None:
        run, place, account = self._run, restart.place, restart.account
        assert place.slices <= run.fleet.held, "workers start on reserved slices only"
        run.cancel_timers(restart)
        restart.waits_for_uploads = False
        for g in restart.groups:
            run.discard_open(run.groups[g])
        generations = {} if restart.full else {g: run.groups[g].generation + 1 for g in restart.groups}
        account.rung = restart.find_rung()
        account.snapshot = run.restorable(restart)
        self._tell_state(restart)
        if restart.full:
            account.steps_lost = self._steps_lost(restart)
            run.begin_epoch()
            run.relocation.outdated = False
            run.do(c.CancelTimer(TimerName.BOUNDARY, 0))
        account.ordered = account.spawned = at
        run.make_groups((*place.assignments, *place.absent), generations)
        restart.groups = {a.group_id for a in place.assignments}
        run.fleet.release(run.fleet.held - run.used_by_others(restart) - place.slices)
        run.stage(restart, Phase.STARTING, at)
        if not restart.full:
            run.do(c.GroupsStarting(at, run.epoch, self._generations(restart)))
        newest = run.checkpoints.newest
        run.do(
            c.StartWorkers(
                run.epoch,
                self._generations(restart),
                place.assignments,
                newest.folder if newest else None,
                restart.reason,
                account.snapshot,
            )
        )
        run.do(c.SetTimer(TimerName.START, restart.key, at + run.settings.deadlines.start_s))

    def _tell_state(self, restart: Restart) -> None:
        """Where its workers have their state from; replica groups that are replaced, from the others."""
        run, account = self._run, restart.account
        newest = run.checkpoints.newest
        if account.snapshot is not None:
            account.restores(f"memory, report {account.snapshot.report}", run.snapshots.since)
        elif newest is not None and restart.full:
            account.restores(f"storage, {newest.folder}", run.checkpoints.since(newest))

    def _steps_lost(self, restart: Restart) -> int:
        before, snapshot = restart.before, restart.account.snapshot
        lost = self._run.checkpoints.lost_since(before.epoch, before.furthest)
        if snapshot is None or snapshot.epoch != before.epoch:
            return lost
        return min(lost, max(0, before.furthest - snapshot.report))

    def _generations(self, restart: Restart) -> tuple[tuple[int, int], ...]:
        return tuple((g, self._run.groups[g].generation) for g in sorted(restart.groups))

    def _of(self, group: Group) -> Restart | None:
        starting = (r for r in self._run.restarts if r.stage is Phase.STARTING)
        return next((r for r in starting if group.number in r.groups), None)

    def spawned(self, group: Group, rank: int, at: float) -> None:
        restart = self._of(group)
        if restart is not None:
            group.spawned.add(rank)
            restart.account.spawned = at

    def ready(self, group: Group, rank: int, at: float) -> Restart | None:
        """The restart that is done, if that was its last worker to be ready."""
        run = self._run
        restart = self._of(group)
        if restart is None:
            return None
        group.ready.add(rank)
        if any(run.groups[g].ready != run.groups[g].ranks for g in restart.groups):
            return None
        run.cancel_timers(restart)
        run.restarts.remove(restart)
        run.trained = True
        restart.account.ready = at
        if restart.full:
            run.trains_since = at
        run.stage(restart, Phase.RUNNING, at)
        self._tell_start(restart, at)
        if restart.account.rung is not Rung.FIRST_START:
            self._awaiting_step.append(restart)
        return restart

    def _tell_start(self, restart: Restart, at: float) -> None:
        run = self._run
        present = [g for g in run.groups.values() if g.number not in run.restarting and not g.nowhere]
        newest = run.checkpoints.newest
        run.do(
            c.GroupStarted(
                at,
                run.epoch,
                self._generations(restart),
                sum(len(group.ranks) for group in present),
                len({name for group in present for name in group.slices()}),
                restart.account.rung,
                restart.reason,
                newest.folder if newest else None,
                restart.account.snapshot is not None,
                restart.account.snapshot,
            )
        )

    def stepped(self, group: Group, rank: int, restore_s: float) -> None:
        """The rank has reported for the first time since it started, or returned."""
        if rank in group.stepped:
            return
        group.stepped.add(rank)
        for restart in self._awaiting_step:
            if group.number in restart.groups:
                restart.account.restore_s = max(restart.account.restore_s, restore_s)

    def tell_recovered(self, at: float) -> None:
        """Once every rank of a restart has reported, say what the recovery cost."""
        groups = self._run.groups
        for restart in list(self._awaiting_step):
            if all(groups[g].stepped == groups[g].ranks for g in restart.groups):
                self._awaiting_step.remove(restart)
                self._run.do(restart.account.recovered(at, self._run.epoch))

    def forget(self, groups: set[int]) -> None:
        """A recovery that fails before its first step is followed by another, which is what gets told."""
        self._awaiting_step = [r for r in self._awaiting_step if not r.groups & groups]

    def in_vain(self, groups: set[int], since: float) -> int:
        """How often in a row these groups were replaced, and had not trained yet.

        Trained: every rank has reported, or a healthy time has passed.
        """
        young = [r for r in self._awaiting_step if r.groups & groups and r.account.ready > since]
        return max((r.attempts + 1 for r in young if not r.full), default=0)
