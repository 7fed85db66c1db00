"""From a failure back to training: settle, stop, pause, place, start.

Everything that isn't steady training is a ``Restart`` that moves through these stages, whether it covers
one replica group or every worker. Which rung of the ladder that was is read off the result (same hosts,
other hosts, fewer), not chosen by a ladder of conditions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from everstep.control import commands as c
from everstep.control.budgets import Backoff, FirstStarts
from everstep.control.commands import Rung
from everstep.control.ending import Ending
from everstep.control.events import TimerName
from everstep.control.failures import BUDGET_OF, Budget, Failure, Incident, Kind
from everstep.control.group import Group
from everstep.control.placing import Placing
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.settling import Settling
from everstep.control.table import Phase
from everstep.topology.slices import HostId, SliceName

# A user's exception says nothing about the machine that it was raised on.
_BLAMES_HOST = frozenset(
    {Kind.EXIT, Kind.SIGNAL, Kind.HOST_LOST, Kind.HOST_SILENT, Kind.START, Kind.TEMPLATE}
)


class Lost(NamedTuple):
    """A host that is gone."""

    host: HostId
    slice: SliceName
    failure: Failure
    held: bool = False
    """Its slice was ours."""


class Recovery:
    def __init__(self, run: Run, ending: Ending) -> None:
        self._run = run
        self._ending = ending
        self._backoff = Backoff(run.settings.deadlines)
        self._first_starts = FirstStarts(run.settings.deadlines.first_start_attempts)
        self._awaiting_step: list[Restart] = []
        """Started, and not every rank has reported since."""
        self._told_unsaved = False
        self.placing = Placing(run, self._start, self._too_few_left)
        self.settling = Settling(run, self.stop)

    # ------------------------------------------------------------------ what fails

    def failed(self, failure: Failure, groups: set[int], at: float, tried: int = 0) -> None:
        """A failure of these groups: part of an incident that is under way, or a new one.

        ``tried``: how many starts have failed already in what some of them are taken from.
        """
        run = self._run
        run.do(c.FailureSeen(at, failure))
        if run.over:
            return
        tried = max(tried, self._replaced_in_vain(groups, failure, at))
        for restart in list(run.restarts):
            if restart not in run.restarts or not (restart.full or restart.groups & groups):
                continue
            groups = set() if restart.full else groups - restart.groups
            match restart.stage:
                case Phase.SETTLING | Phase.STOPPING:
                    self._join_incident(restart, failure, at)
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
        if self._escalate_if_all_failed(restart, at):
            return
        if not restart.full and tried >= run.settings.group_attempts:
            self._escalate(restart, at)
            return
        self.settling.begin(restart, failure, at)

    def _replaced_in_vain(self, groups: set[int], failure: Failure, at: float) -> int:
        """How often in a row these groups were replaced, and failed again before they had trained.

        Trained: every rank has reported, or a healthy time has passed.
        """
        if failure.kind is Kind.PREEMPTED:
            return 0
        since = at - self._run.settings.deadlines.healthy_s
        young = [r for r in self._awaiting_step if r.groups & groups and r.ready > since]
        return max((r.attempts + 1 for r in young if not r.full), default=0)

    def _widen(self, restart: Restart, groups: set[int], failure: Failure, at: float) -> None:
        """Groups that fail together are replaced together."""
        run = self._run
        restart.cover([run.groups[g] for g in restart.groups | groups], run.epoch)
        self._forget_awaited(groups)
        tried_enough = restart.attempts >= run.settings.group_attempts
        if restart.incident is not None and (tried_enough or self._would_be_all()):
            restart.incident.add(failure)
            self._escalate(restart, at)
            return
        self._join_incident(restart, failure, at)
        if restart.stage is Phase.STOPPING:
            self._stop_workers(restart, at)

    def _join_incident(self, restart: Restart, failure: Failure, at: float) -> None:
        if restart.incident is None:
            return  # a resize is ending these workers: what they say of each other now costs nothing
        restart.incident.add(failure)
        restart.reason = _why(restart.incident.cause)
        self.settling.joined(restart, failure, at)

    def time_is_up(self, restart: Restart, what: TimerName, at: float) -> None:
        """What is waited for has had its time; so have groups that fail together."""
        self.settling.time_is_up(restart, what, at)
        self._check_stopped(restart, at)

    def _would_be_all(self) -> bool:
        return {g for restart in self._run.restarts for g in restart.groups} >= set(self._run.groups)

    def _escalate_if_all_failed(self, restart: Restart, at: float) -> bool:
        """When no group is left to go on, this is a restart of everything."""
        if restart.full or not self._would_be_all():
            return False
        self._escalate(restart, at)
        return True

    def _too_few_left(self, restart: Restart, at: float) -> None:
        """Fewer groups than the user wants have a place: all of them wait for more, from the checkpoint."""
        restart.incident = None  # it is paid for
        self._escalate(restart, at)

    def _escalate(self, restart: Restart, at: float) -> None:
        """Turn a replacement of some groups into a restart of all workers."""
        run = self._run
        incident = restart.incident
        for other in list(run.restarts):
            if other is not restart:
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
        restart.assign(())
        if incident is not None:
            restart.reason = _why(incident.cause)
        restart.cover(list(run.groups.values()), run.epoch)
        self._forget_awaited(restart.groups)
        run.relocation.absorb()
        run.relocation.ask_nothing()
        # The run itself joins the restart now, which until here moved alone.
        restart.stage = Phase.RUNNING
        self.stop(restart, at)

    def start_failed(self, restart: Restart, failure: Failure, at: float) -> None:
        """A start did not work out: stop what has started, and go round again, or up the ladder."""
        run = self._run
        if restart.incident is not None and restart.incident.charged and failure.at < restart.ordered:
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
            self.settling.begin(restart, failure, at)
        else:
            self._decide(restart, at)

    def place_failed(self, restart: Restart, failure: Failure, at: float) -> None:
        """The same, before there were workers to speak of it."""
        self._run.do(c.FailureSeen(at, failure))
        self.start_failed(restart, failure, at)

    # ------------------------------------------------------------------ hosts

    def hosts_lost(self, lost: Collection[Lost], at: float) -> None:
        """These hosts are gone, and a slice lives and dies as one: all groups in it go with it.

        What is lost at once is taken in whole before anything is decided: nobody is placed where the next
        one of them was.
        """
        run = self._run
        if run.phase is Phase.ENDED or not lost:
            return
        lost = [self._forget(one) for one in lost]
        if run.over:
            for one in lost:
                self._ending.gone(one.host, None, at)
            return
        # Those that are about to use them; not those that are placed anew because of this.
        placed = [(r, r.slices) for r in run.restarts if r.stage is Phase.PLACING]
        for one in lost:
            run.relocation.host_failed(one.host, at)
            for restart in run.restarts:
                restart.stopping.pop(one.host, None)
        for one in lost:
            self._slice_failed(one.slice, one.failure, at)
        for restart in list(run.restarts):
            self._check_stopped(restart, at)
        for restart, slices in placed:
            missed = [one for one in lost if one.slice in slices]
            if not missed or restart not in run.restarts or restart.stage is not Phase.PLACING:
                continue
            had = next((one for one in missed if one.held), None)
            if had is not None:
                self.place_failed(restart, while_starting(had.failure), at)
            else:
                self.placing.place(restart, at)

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

    def host_was_lost(self, host: HostId, failure: Failure) -> None:
        """That the host is gone was known, from its absence in a list; now it is known since when."""
        for restart in self._run.restarts:
            if restart.incident is not None and restart.stage in (Phase.SETTLING, Phase.STOPPING):
                restart.incident.date(host, failure.at)

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
            if not restart.full and name in restart.old_slices:
                run.abandon(restart)
                failed |= restart.groups
                tried = max(tried, restart.attempts)
        self.failed(failure, failed, at, tried)

    def host_unprepared(self, host: HostId, failure: Failure, at: float) -> None:
        run = self._run
        was_prepared = host in run.fleet.prepared
        run.fleet.forget(host)
        run.relocation.host_failed(host, at)
        for restart in list(run.restarts):
            if restart not in run.restarts or restart.stage is not Phase.PLACING or host not in restart.hosts:
                continue
            if was_prepared:
                self.placing.go_on(restart, at)  # its template died after its workers did, and is made again
            else:
                self.place_failed(restart, while_starting(failure), at)
        groups = {group.number for group in run.groups.values() if group.left_on(host) - group.returned}
        if groups:
            starting = any(not run.groups[g].left_on(host) <= run.groups[g].ready for g in groups)
            self.failed(while_starting(failure) if starting else failure, groups, at)

    # ------------------------------------------------------------------ stopping

    def begin(
        self, groups: Collection[int], *, full: bool, incident: Incident | None, reason: str, at: float
    ) -> Restart:
        run = self._run
        some = Phase.NEW if all(run.groups[g].nowhere for g in groups) else Phase.RUNNING
        stage = run.phase if full else some
        restart = Restart(run.next_key(), stage=stage, full=full, incident=incident, reason=reason, began=at)
        restart.cover([run.groups[g] for g in sorted(run.groups if full else groups)], run.epoch)
        run.restarts.append(restart)
        self._forget_awaited(restart.groups)
        run.relocation.absorb()
        if full:
            run.relocation.ask_nothing()
        return restart

    def stop(self, restart: Restart, at: float) -> None:
        restart.awaits.clear()
        self._run.stage(restart, Phase.STOPPING, at)
        self._stop_workers(restart, at)

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
        self._check_stopped(restart, at)

    def workers_gone(self, host: HostId, ranks: set[int], at: float) -> None:
        run = self._run
        silent = self._died_without_a_word(ranks)
        for restart in list(run.restarts):
            if host in restart.stopping:
                restart.stopping[host] -= ranks
                if not restart.stopping[host]:
                    del restart.stopping[host]
                self._check_stopped(restart, at)
        if silent is not None and not run.over:
            group, rank = silent
            failure = Failure(Kind.EXIT, at, "ended without a word", rank=rank, host=host)
            self.failed(failure if rank in group.ready else while_starting(failure), {group.number}, at)

    def _died_without_a_word(self, ranks: set[int]) -> tuple[Group, int] | None:
        """A rank that neither returned, nor failed, nor was told to end."""
        run = self._run
        told = {g for r in run.restarts if r.stage is not Phase.STARTING for g in r.groups}
        for rank in sorted(ranks):
            group = run.group_of(rank)
            if group is not None and rank not in group.returned and group.number not in told:
                return group, rank
        return None

    def _check_stopped(self, restart: Restart, at: float) -> None:
        run = self._run
        if restart not in run.restarts or restart.stage is not Phase.STOPPING:
            return
        if restart.stopping or restart.awaits:
            return
        run.do(c.CancelTimer(TimerName.KILL, restart.key))
        if not restart.full and restart.incident is not None:
            together = restart.incident.seen + run.settings.deadlines.together_s
            if at < together:
                run.do(c.SetTimer(TimerName.SETTLE, restart.key, together))
                return
        # A replica group that is replaced gets its state from its peers: for that no upload is waited for.
        worth = run.worth_of_uploads(restart) if restart.full else 0.0
        restart.waits_for_uploads = worth > 0 and bool(run.uploading_hosts(restart))
        if restart.waits_for_uploads:
            limit_s = min(worth, run.settings.deadlines.upload_wait_s)
            run.do(c.SetTimer(TimerName.UPLOAD, restart.key, at + limit_s))
        self._decide(restart, at)

    def storage_changed(self, at: float) -> None:
        """An upload or a commit is done: what waited for it goes on."""
        for restart in list(self._run.restarts):
            if restart.waits_for_uploads and not self._run.uploading_hosts(restart):
                self.stop_waiting_for_uploads(restart, at)
            else:
                self.placing.go_on(restart, at)

    def stop_waiting_for_uploads(self, restart: Restart, at: float) -> None:
        restart.waits_for_uploads = False
        self._run.do(c.CancelTimer(TimerName.UPLOAD, restart.key))
        if restart.stage is Phase.WAITING:
            self.placing.place(restart, at)  # which gives back the slices that were kept for it
        else:
            self.placing.go_on(restart, at)

    # ------------------------------------------------------------------ deciding

    def progressed(self) -> None:
        self._backoff.progressed()

    def _decide(self, restart: Restart, at: float) -> None:
        """The workers concerned are gone: charge the incident, then pause, place, or give up."""
        run = self._run
        pause = 0.0
        if restart.incident is not None:
            paid = restart.incident.charged
            if not paid and not self._charge(restart, restart.incident, at):
                return
            # A slice that is taken away says nothing about the next one.
            if restart.incident.cause.kind is not Kind.PREEMPTED:
                pause = self._backoff.next_pause(at)
            if not paid:
                self._tell_decision(restart, restart.incident.cause, pause, at)
            self._ending.check_finished(at)
            if run.over:
                return
        if pause > 0:
            run.stage(restart, Phase.BACKOFF, at)
            run.do(c.SetTimer(TimerName.BACKOFF, restart.key, at + pause))
        else:
            self.placing.place(restart, at)

    def _budget_of(self, restart: Restart, cause: Failure) -> Budget | None:
        """Replacing groups spends a budget of its own, if there is one."""
        budget = BUDGET_OF[cause.kind]
        own = not restart.full and self._run.settings.max_replica_failures is not None
        return Budget.REPLICAS if own and budget is Budget.FAILURES else budget

    def _charge(self, restart: Restart, incident: Incident, at: float) -> bool:
        """False: that was one too many. The run ends, or goes up the ladder."""
        assert not incident.charged, "an incident is charged once"
        cause = incident.cause
        budget = self._budget_of(restart, cause)
        if budget is None:
            self._ending.give_up(cause, tuple(incident.failures), at)
            return False
        if cause.kind is Kind.START and not self._run.trained and self._first_starts.failed(cause):
            why = (
                f"the start failed {self._first_starts.limit} times in the same way, and nothing was trained"
            )
            self._ending.give_up(cause, tuple(incident.failures), at, why)
            return False
        if not self._run.budgets.spend(budget):
            if budget is Budget.REPLICAS:
                self._escalate(restart, at)
                return False
            why = f"{budget.value}={self._run.budgets.limits[budget]} is spent"
            self._ending.give_up(cause, tuple(incident.failures), at, why)
            return False
        incident.charged = True
        if cause.host is not None and not cause.echo and cause.kind in _BLAMES_HOST:
            until = self._run.fleet.suspects.blame(cause.host, at)
            if until is not None:
                self._run.do(c.HostSetAside(at, cause.host, until))
        return True

    def _tell_decision(self, restart: Restart, cause: Failure, pause: float, at: float) -> None:
        budget = self._budget_of(restart, cause)
        assert budget is not None
        budgets = self._run.budgets
        groups = () if restart.full else tuple(sorted(restart.groups))
        spent, limit = budgets.spent[budget], budgets.limits[budget]
        unsaved = 0 if restart.full or self._told_unsaved else self._unsaved(restart)
        self._told_unsaved = self._told_unsaved or bool(unsaved)
        self._run.do(c.RecoveryDecided(at, cause, budget.value, spent, limit, groups, pause, unsaved))

    def _unsaved(self, restart: Restart) -> int:
        """Steps of the groups that go on while there is no checkpoint."""
        others = [g for g in self._run.groups.values() if g.number not in restart.groups]
        return 0 if self._run.checkpoints.newest else max((g.book.furthest for g in others), default=0)

    # ------------------------------------------------------------------ starting

    def _start(self, restart: Restart, at: float) -> None:
        run = self._run
        assert restart.slices <= run.fleet.held, "workers start on reserved slices only"
        run.cancel_timers(restart)
        restart.waits_for_uploads = False
        for g in restart.groups:
            run.discard_open(run.groups[g])
        generations = {} if restart.full else {g: run.groups[g].generation + 1 for g in restart.groups}
        restart.rung = restart.find_rung()
        restart.snapshot = run.restorable(restart)
        self._tell_state(restart)
        if restart.full:
            restart.steps_lost = self._steps_lost(restart)
            run.begin_epoch()
            run.relocation.outdated = False
            run.do(c.CancelTimer(TimerName.BOUNDARY, 0))
        restart.ordered = restart.spawned = at
        run.make_groups((*restart.assignments, *restart.absent), generations)
        restart.groups = {a.group_id for a in restart.assignments}
        run.fleet.release(run.fleet.held - run.used_by_others(restart) - restart.slices)
        run.stage(restart, Phase.STARTING, at)
        if not restart.full:
            run.do(c.GroupsStarting(at, run.epoch, self._generations(restart)))
        newest = run.checkpoints.newest
        run.do(
            c.StartWorkers(
                run.epoch,
                self._generations(restart),
                restart.assignments,
                newest.folder if newest else None,
                restart.reason,
                restart.snapshot,
            )
        )
        run.do(c.SetTimer(TimerName.START, restart.key, at + run.settings.deadlines.start_s))

    def _tell_state(self, restart: Restart) -> None:
        """Where its workers have their state from; replica groups that are replaced, from the others."""
        run, newest = self._run, self._run.checkpoints.newest
        if restart.snapshot is not None:
            restart.restores(f"memory, report {restart.snapshot.report}", run.snapshots.since)
        elif newest is not None and restart.full:
            restart.restores(f"storage, {newest.folder}", run.checkpoints.since(newest))

    def _steps_lost(self, restart: Restart) -> int:
        lost = self._run.checkpoints.lost_since(restart.old_epoch, restart.old_furthest)
        snapshot = restart.snapshot
        if snapshot is None or snapshot.epoch != restart.old_epoch:
            return lost
        return min(lost, max(0, restart.old_furthest - snapshot.report))

    def _generations(self, restart: Restart) -> tuple[tuple[int, int], ...]:
        return tuple((g, self._run.groups[g].generation) for g in sorted(restart.groups))

    def _starting(self, group: Group) -> Restart | None:
        starting = (r for r in self._run.restarts if r.stage is Phase.STARTING)
        return next((r for r in starting if group.number in r.groups), None)

    def spawned(self, group: Group, rank: int, at: float) -> None:
        restart = self._starting(group)
        if restart is not None:
            group.spawned.add(rank)
            restart.spawned = at

    def ready(self, group: Group, rank: int, at: float) -> bool:
        """Whether that was the last worker of its start to be ready."""
        run = self._run
        restart = self._starting(group)
        if restart is None:
            return False
        group.ready.add(rank)
        if any(run.groups[g].ready != run.groups[g].ranks for g in restart.groups):
            return False
        run.cancel_timers(restart)
        run.restarts.remove(restart)
        run.trained = True
        self._backoff.healthy(at)
        restart.ready = at
        if restart.full:
            run.trains_since = at
        run.stage(restart, Phase.RUNNING, at)
        self._tell_start(restart, at)
        if restart.rung is not Rung.FIRST_START:
            self._awaiting_step.append(restart)
            self.check_stepped(at)
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
            if restart.full:
                return  # too few have a place, and all wait

    def _tell_start(self, restart: Restart, at: float) -> None:
        away = {g for other in self._run.restarts for g in other.groups}
        present = [g for g in self._run.groups.values() if g.number not in away and not g.nowhere]
        newest = self._run.checkpoints.newest
        self._run.do(
            c.GroupStarted(
                at,
                self._run.epoch,
                self._generations(restart),
                sum(len(group.ranks) for group in present),
                len({name for group in present for name in group.slices()}),
                restart.rung,
                restart.reason,
                newest.folder if newest else None,
                restart.snapshot is not None,
            )
        )

    def stepped(self, group: Group, rank: int, restore_s: float, at: float) -> None:
        """The rank has reported for the first time since it started, or returned."""
        if rank in group.stepped:
            return
        group.stepped.add(rank)
        for restart in self._awaiting_step:
            if group.number in restart.groups:
                restart.restore_s = max(restart.restore_s, restore_s)
        self.check_stepped(at)

    def check_stepped(self, at: float) -> None:
        """Once every rank of a restart has reported, say what the recovery cost."""
        groups = self._run.groups
        for restart in list(self._awaiting_step):
            if all(groups[g].stepped == groups[g].ranks for g in restart.groups):
                self._awaiting_step.remove(restart)
                self._run.do(restart.recovered(at, self._run.epoch))

    def _forget_awaited(self, groups: set[int]) -> None:
        """A recovery that fails before its first step is followed by another, which is what gets told."""
        self._awaiting_step = [r for r in self._awaiting_step if not r.groups & groups]

    # ------------------------------------------------------------------ time that is up

    def kill_timed_out(self, restart: Restart, at: float) -> None:
        for host in sorted(restart.stopping):
            self.unresponsive(host, at)

    def unresponsive(self, host: HostId, at: float) -> None:
        """Its workers should be gone, and it doesn't say so: it counts as lost."""
        run = self._run
        run.fleet.lose(host)
        places = (member for group in run.groups.values() for member in group.members.values())
        name = next(member.slice for member in places if member.host == host)
        failure = Failure(Kind.HOST_SILENT, at, "did not confirm the end of its workers", host=host)
        self.hosts_lost([Lost(host, name, failure)], at)

    def prepare_timed_out(self, restart: Restart, at: float) -> None:
        run = self._run
        late = sorted(restart.hosts - run.fleet.prepared)
        if not late:
            return
        limit = run.settings.deadlines.prepare_s
        message = f"host {late[0]} not ready after {limit:g} s (Deadlines.prepare_s)"
        for host in late:
            run.fleet.forget(host)
        self.place_failed(restart, Failure(Kind.START, at, message, host=late[0]), at)

    def start_timed_out(self, restart: Restart, at: float) -> None:
        run = self._run
        late = sorted(rank for g in restart.groups for rank in run.groups[g].ranks - run.groups[g].ready)
        place = next(a for a in restart.assignments if a.rank == late[0])
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
