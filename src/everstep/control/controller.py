"""The brain of a run: it is told events and answers with commands.

Here is the way in, and what each event means. How failures lead back to training is in ``recovery``, how a
run ends in ``ending``, when to move workers that could train on in ``relocation``, and what is held of the
cluster in ``fleet``.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budgets
from everstep.control.checkpoints import Checkpoints
from everstep.control.commands import Outcome
from everstep.control.ending import Ending
from everstep.control.events import CheckpointRef, TimerName
from everstep.control.failures import BUDGET_OF, Failure, Kind
from everstep.control.group import Group
from everstep.control.placement import groups_nowhere
from everstep.control.recovery import Lost, Recovery, while_starting
from everstep.control.relocation import NEW_CODE
from everstep.control.run import Run
from everstep.control.settings import Settings
from everstep.control.snapshots import At
from everstep.control.table import Phase

__all__ = ["Controller", "Settings"]


class Controller:
    """``handle`` is the only way in. Time comes with the events, and commands come out."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run = Run(settings)
        self._ending = Ending(self.run)
        self._recovery = Recovery(self.run, self._ending)

    @property
    def phase(self) -> Phase:
        return self.run.phase

    @property
    def epoch(self) -> int:
        return self.run.epoch

    @property
    def groups(self) -> dict[int, Group]:
        return self.run.groups

    @property
    def newest(self) -> CheckpointRef | None:
        return self.run.checkpoints.newest

    def committing(self, group: Group) -> set[int]:
        """Reports of this group whose checkpoints are being committed."""
        return self.run.checkpoints.committing(self.run.epoch, group.number, group.generation)

    @property
    def asked(self) -> c.AskReason:
        """Why the workers should save now, if they should."""
        return self.run.relocation.asked

    @property
    def budgets(self) -> Budgets:
        return self.run.budgets

    def handle(self, event: e.AnyEvent) -> list[c.AnyCommand]:
        """Take one event; return what is to be done now, in order."""
        if self.run.phase is Phase.ENDED:
            return []
        self.run.out = []
        self._dispatch(event)
        self.run.assert_invariants()
        return self.run.out

    def _dispatch(self, event: e.AnyEvent) -> None:
        match event:
            # What comes most often is looked for first.
            case e.Reported():
                self._reported(event)
            case e.TimerFired():
                self._timer_fired(event)
            case e.RunOpened():
                self._open(event)
            case e.LeaseLost():
                self._fenced(event)
            case e.StopRequested():
                self._ending.stop_requested(event)
            case e.StorageLost():
                self._ending.storage_lost(event.at)
            case e.CapacityChanged():
                self._capacity_changed(event)
            case e.Reserved():
                self._reserved(event)
            case e.ReservationFailed():
                self.run.fleet.refused(event.reservation)
                self._reservation_failed(event.reservation, event.reason, event.at)
            case e.HostPrepared():
                self._host_prepared(event)
            case e.HostUnprepared():
                self._host_unprepared(event)
            case e.HostLost():
                self._host_lost(event)
            case e.PreemptionNotice():
                self._preemption_notice(event)
            case e.NoticeCancelled():
                self._notice_cancelled(event)
            case e.WorkerSpawned():
                self._worker_spawned(event)
            case e.WorkerReady():
                self._worker_ready(event)
            case e.WorkerFailed():
                self._worker_failed(event)
            case e.WorkerReturned():
                self._worker_returned(event)
            case e.UploadFailed():
                self._upload_failed(event)
            case e.WorkersGone():
                self._workers_gone(event)
            case e.CheckpointCommitted():
                self._checkpoint_committed(event)
            case e.SnapshotDamaged():
                self.run.snapshots.forget()
            case e.CheckpointDamaged() | e.CheckpointGone():
                self.run.checkpoints.forget(event.folder)
            case e.CommitFailed():
                self._commit_failed(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------------ opening, and losing the lease

    def _open(self, event: e.RunOpened) -> None:
        run = self.run
        assert run.phase is Phase.NEW, "a run is opened once"
        run.epoch = event.last_epoch
        run.checkpoints = Checkpoints(event.checkpoints, event.let_go)
        for budget, spent in event.spent:
            run.budgets.spent[budget] = spent
        if event.notices:
            used = {a.slice for a in event.adopted.assignments} if event.adopted is not None else ()
            run.relocation.recall(event.notices, used, event.at)
        run.do(c.RequestCapacity(self.settings.workers_max))
        if event.adopted is not None:
            self._adopt(event.adopted, event.at)
            return
        reason = "resumed" if event.last_epoch else "first start"
        restart = self._recovery.begin([], full=True, incident=None, reason=reason, at=event.at)
        self._recovery.placing.place(restart, event.at)

    def _adopt(self, adopted: e.Adopted, at: float) -> None:
        run = self.run
        assert run.epoch <= adopted.epoch, "workers of an old epoch are not adopted"
        run.epoch = adopted.epoch
        absent = groups_nowhere(adopted.assignments, adopted.assignments[0].num_groups)
        run.make_groups((*adopted.assignments, *absent), dict(adopted.generations))
        for group in run.groups.values():
            if not group.nowhere:
                group.spawned = set(group.ranks)
                group.ready = set(group.ranks)
        slice_of = {a.host: a.slice for a in adopted.assignments}
        run.fleet.held = set(slice_of.values())
        if adopted.outdated:
            # Nothing has the new code yet. An epoch never mixes two versions: whatever starts next is new.
            run.relocation.outdated = True
            run.do(c.SetTimer(TimerName.BOUNDARY, 0, at + self.settings.deadlines.boundary_s))
        else:
            run.fleet.prepared = set(slice_of)
            run.trained = True
        run.set_phase(Phase.RUNNING, at)
        run.relocation.started(at)
        if self.settings.group_size is None:
            members = {a.rank: a.host for a in adopted.assignments}
            run.pass_on(run.snapshots.adopt(members, adopted.copies))
        gone = [(host, name) for host, name in sorted(slice_of.items()) if not run.fleet.alive(host)]
        self._recovery.hosts_lost([Lost(host, name, _unlisted(host, at)) for host, name in gone], at)
        if not run.relocation.outdated and not any(restart.full for restart in run.restarts):
            self._recovery.find_places(at)
        self._reconsider(at)

    def _fenced(self, event: e.LeaseLost) -> None:
        # A fenced driver changes nothing: no stop, no release. Who has the lease now owns all of it.
        self.run.phase = Phase.ENDED
        self.run.restarts.clear()
        self.run.do(c.EndRun(Outcome.FENCED, None, (), event.holder))

    # ------------------------------------------------------------------ capacity, reservations, hosts

    def _capacity_changed(self, event: e.CapacityChanged) -> None:
        run, at = self.run, event.at
        lost = run.fleet.learn(event.hosts)
        run.relocation.listed(at)
        if run.phase is Phase.NEW:
            return
        self._recovery.hosts_lost([Lost(view.id, view.slice, _unlisted(view.id, at)) for view in lost], at)
        if run.over:
            return
        self._place_again(at)
        self._reconsider(at)

    def _place_again(self, at: float) -> None:
        """Who waits for a place, or has lost the one that was planned, looks again."""
        placing = self._recovery.placing
        for restart in list(self.run.restarts):
            if restart not in self.run.restarts:
                continue
            waits = restart.stage is Phase.WAITING
            if waits or (restart.stage is Phase.PLACING and not placing.can_be_had(restart)):
                placing.place(restart, at)

    def _reserved(self, event: e.Reserved) -> None:
        run = self.run
        if run.relocation.is_for_standby(event.reservation):
            run.relocation.granted(event.reservation, event.at)
        elif run.fleet.granted(event.reservation):
            for restart in list(run.restarts):
                if restart.reservation == event.reservation:
                    self._recovery.placing.granted(restart, event.at)

    def _reservation_failed(self, reservation: int, reason: str, at: float) -> None:
        run = self.run
        if run.relocation.is_for_standby(reservation):
            run.relocation.failed(reservation, at)
            return
        for restart in list(run.restarts):
            if restart.reservation == reservation:
                self._recovery.place_failed(restart, Failure(Kind.RESERVATION, at, reason), at)

    def _host_prepared(self, event: e.HostPrepared) -> None:
        run = self.run
        if event.host not in run.fleet.preparing:
            return  # given back or lost meanwhile
        run.fleet.preparing.discard(event.host)
        run.fleet.prepared.add(event.host)
        for restart in list(run.restarts):
            if run.fleet.preparing.isdisjoint(restart.hosts):  # that was the last it waited for
                self._recovery.placing.go_on(restart, event.at)
        if run.relocation.check_ready():
            self._reconsider(event.at)

    def _host_unprepared(self, event: e.HostUnprepared) -> None:
        run, failure = self.run, event.failure
        if event.host not in run.fleet.prepared | run.fleet.preparing or run.over:
            return
        if failure.kind is Kind.LIMIT or (BUDGET_OF[failure.kind] is None and not run.trained):
            self._ending.give_up(failure, (failure,), event.at)
        else:
            self._recovery.host_unprepared(event.host, failure, event.at)

    def _host_lost(self, event: e.HostLost) -> None:
        view = self.run.fleet.lose(event.host)
        if view is not None:
            self._recovery.hosts_lost([Lost(view.id, view.slice, event.failure)], event.at)
        else:
            self._recovery.host_was_lost(event.host, event.failure)

    # ------------------------------------------------------------------ workers

    def _worker_spawned(self, event: e.WorkerSpawned) -> None:
        group = self.run.current(event)
        if group is not None:
            self._recovery.spawned(group, event.rank, event.at)

    def _worker_ready(self, event: e.WorkerReady) -> None:
        group = self.run.current(event)
        if group is not None and self._recovery.ready(group, event.rank, event.at):
            self.run.relocation.started(event.at)
            self._ending.check_finished(event.at)
            self._reconsider(event.at)

    def _worker_failed(self, event: e.WorkerFailed) -> None:
        run, failure = self.run, event.failure
        group = run.current(event)
        if group is None or event.rank in group.returned or event.rank in group.gone:
            return
        group.failed.add(event.rank)
        if failure.kind is Kind.LIMIT and not run.over:
            run.do(c.FailureSeen(event.at, failure))
            self._ending.give_up(failure, (failure,), event.at)
            return
        if BUDGET_OF[failure.kind] is None:
            if run.trained:  # it has been loaded before: it must be this host
                failure = while_starting(failure)
        elif event.rank not in group.ready:
            failure = while_starting(failure)
        elif failure.kind is Kind.SIGNAL and group.members[event.rank].slice in run.fleet.noticed:
            # The machine that is being taken away ends its processes first.
            failure = msgspec.structs.replace(failure, kind=Kind.PREEMPTED)
        self._recovery.failed(failure, {group.number}, event.at)

    def _worker_returned(self, event: e.WorkerReturned) -> None:
        group = self.run.current(event)
        if group is None or event.rank in group.returned:
            return
        group.returned.add(event.rank)
        self._recovery.stepped(group, event.rank, 0.0, event.at)
        self.run.pass_on(self.run.snapshots.returned(event.rank))
        self.run.settle(group, group.book.returned(event.rank))
        self._recovery.settling.came_further(event.at)
        self._ending.check_finished(event.at)

    def _workers_gone(self, event: e.WorkersGone) -> None:
        run = self.run
        if event.epoch != run.epoch:
            return
        gone: set[int] = set()
        for group in run.groups.values():
            if group.generation == event.generation:
                gone |= event.ranks & group.left_on(event.host)
                group.gone |= gone & group.ranks
        if run.over:
            self._ending.gone(event.host, gone, event.at)
        else:
            self._recovery.workers_gone(event.host, gone, event.at)

    # ------------------------------------------------------------------ reports and checkpoints

    def _reported(self, event: e.Reported) -> None:
        group = self.run.current(event)
        if group is None:
            return
        self._recovery.stepped(group, event.rank, event.restore_s, event.at)
        self._copied(event)
        self.run.settle(group, group.book.reported(event.rank, event.upto, event.owed, event.parts))
        self._recovery.settling.came_further(event.at)
        self._storage_changed(event.at)

    def _copied(self, event: e.Reported) -> None:
        snapshots = self.run.snapshots
        before = snapshots.kept
        copied = [At(event.epoch, index) for index in event.copied]
        self.run.pass_on(snapshots.reported(event.rank, At(event.epoch, event.upto), copied))
        if snapshots.kept != before:
            self._recovery.progressed()

    def _upload_failed(self, event: e.UploadFailed) -> None:
        group = self.run.current(event)
        if group is not None:
            self.run.settle(group, group.book.upload_failed(event.rank, event.index))
            self._storage_changed(event.at)

    def _checkpoint_committed(self, event: e.CheckpointCommitted) -> None:
        run, at = self.run, event.at
        held = run.is_held(event.folder)
        ref = run.checkpoints.committed(event.folder, event.state)
        if ref is None:
            return
        run.do(c.CheckpointKept(at, ref.folder, ref.epoch, ref.index, ref.group, ref.generation))
        if ref.epoch == run.epoch:
            self._recovery.progressed()
        self._storage_changed(at)
        if ref.epoch == run.epoch and run.relocation.saved(run.groups, at):
            self._reconsider(at, just_saved=True)
        if held and run.phase is Phase.RUNNING and not run.restarts and ref.epoch == run.epoch:
            self._change_over(run.relocation.change_over(run.groups, at), at)

    def _change_over(self, reason: str, at: float) -> None:
        """Start all workers anew although none has failed, if there is a reason."""
        if reason:
            restart = self._recovery.begin([], full=True, incident=None, reason=reason, at=at)
            self._recovery.stop(restart, at)

    def _commit_failed(self, event: e.CommitFailed) -> None:
        """Its folder stays as it is: what can't be committed by us may be somebody else's."""
        self.run.is_held(event.folder)
        if self.run.checkpoints.failed(event.folder):
            if event.cause is not None:
                self.run.do(c.FailureSeen(event.at, event.cause))
                self._ending.refuse(event.cause, event.at)
            self._storage_changed(event.at)

    def _storage_changed(self, at: float) -> None:
        self._recovery.storage_changed(at)
        self._ending.check_ended(at)

    # ------------------------------------------------------------------ growing, and leaving in time

    def _reconsider(self, at: float, just_saved: bool = False) -> None:
        """Something changed while the run trains: is there a better place?"""
        run = self.run
        if run.phase is Phase.RUNNING:
            replaced = {g for restart in run.restarts for g in restart.groups}
            taken = {name for restart in run.restarts for name in restart.slices}
            run.relocation.reconsider(run.groups, replaced, taken, at)
            self._leave_if_due(at, just_saved)

    def _leave_if_due(self, at: float, just_saved: bool = False) -> None:
        run = self.run
        if run.phase is not Phase.RUNNING:
            return
        replaced = {g for restart in run.restarts for g in restart.groups}
        taken = {name for restart in run.restarts for name in restart.slices}
        going = run.relocation.leave_now(run.groups, replaced, taken, at, just_saved)
        if going:
            names = sorted(run.relocation.leaving(run.groups))
            host = min(view.id for view in run.fleet.hosts.values() if view.slice in names)
            message = f"slice {', '.join(names)} is being taken away"
            self._recovery.failed(Failure(Kind.PREEMPTED, at, message, host=host), going, at)

    def _preemption_notice(self, event: e.PreemptionNotice) -> None:
        self.run.relocation.noticed(event.host, event.deadline, event.at)
        self._reconsider(event.at)

    def _notice_cancelled(self, event: e.NoticeCancelled) -> None:
        if self.run.relocation.host_cancelled(event.host, event.at):
            self._place_again(event.at)
            self._reconsider(event.at)

    # ------------------------------------------------------------------ timers

    def _timer_fired(self, event: e.TimerFired) -> None:
        run, recovery, at = self.run, self._recovery, event.at
        restart = next((r for r in run.restarts if r.key == event.key), None)
        match event.timer:
            case TimerName.GROW:
                self._reconsider(at)
            case TimerName.BOUNDARY:
                if run.phase is Phase.RUNNING and run.relocation.outdated:
                    self._change_over(NEW_CODE, at)
            case TimerName.MIGRATE:
                run.relocation.alarm(at)
                self._place_again(at)
                self._reconsider(at)
            case TimerName.RESERVE:
                reason = f"not granted within {self.settings.deadlines.reserve_s:g} s (Deadlines.reserve_s)"
                self._reservation_failed(event.key, reason, at)
            case TimerName.PREPARE:
                if run.relocation.is_for_standby(event.key):
                    run.relocation.failed(event.key, at)
                elif restart is not None and restart.stage is Phase.PLACING:
                    recovery.prepare_timed_out(restart, at)
            case TimerName.KILL:
                if run.over:
                    for host in self._ending.hosts:
                        recovery.unresponsive(host, at)
                elif restart is not None:
                    recovery.kill_timed_out(restart, at)
            case TimerName.UPLOAD:
                if run.over:
                    self._ending.uploads_took_too_long(at)
                elif restart is not None:
                    recovery.stop_waiting_for_uploads(restart, at)
            case TimerName.SETTLE | TimerName.FINISH_REPORT:
                if restart is not None:
                    recovery.time_is_up(restart, event.timer, at)
            case TimerName.BACKOFF:
                if restart is not None and restart.stage is Phase.BACKOFF:
                    recovery.placing.place(restart, at)
            case TimerName.START:
                if restart is not None and restart.stage is Phase.STARTING:
                    recovery.start_timed_out(restart, at)
            case TimerName.SAY_SHORTAGE:
                if restart is not None and restart.stage is Phase.WAITING:
                    recovery.placing.say_shortage(restart, at)
            case _:
                assert_never(event.timer)


def _unlisted(host: str, at: float) -> Failure:
    return Failure(Kind.HOST_LOST, at, "the engine doesn't list it any more", host=host)
