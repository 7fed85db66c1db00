"""The brain of a run: it is told events and answers with commands.

Here is the way in. What is told of hosts is in ``hosts``, what is told of workers in ``workers``; how
failures lead back to training is in ``recovery``, how a run ends in ``ending``, when to move workers that
could train on in ``relocation``, and what is held of the cluster in ``fleet``.
"""

from __future__ import annotations

from typing import assert_never

from everstep.control import commands as c, events as e
from everstep.control.budgets import Budgets
from everstep.control.checkpoints import Checkpoints
from everstep.control.commands import Outcome
from everstep.control.ending import Ending
from everstep.control.events import CheckpointRef, TimerName
from everstep.control.group import Group
from everstep.control.hosts import Hosts, Lost, unlisted
from everstep.control.moving import Moving
from everstep.control.recovery import Recovery
from everstep.control.run import Run
from everstep.control.settings import Settings
from everstep.control.table import Phase
from everstep.control.watch import HangWatch
from everstep.control.workers import WorkerEvents
from everstep.topology.placement import groups_nowhere

__all__ = ["Controller", "Settings"]


class Controller:
    """``handle`` is the only way in. Time comes with the events, and commands come out."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run = Run(settings)
        self._ending = Ending(self.run)
        self._recovery = Recovery(self.run, self._ending)
        self._moving = Moving(self.run, self._recovery)
        self._hosts = Hosts(self.run, self._recovery, self._moving, self._ending)
        self._workers = WorkerEvents(self.run, self._recovery, self._moving, self._ending)
        self._hangs = HangWatch(self.run, self._recovery.failed, self._ending.give_up)

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
        self._recovery.advance(event.at)
        self._ending.advance(event.at)
        self.run.assert_invariants()
        return self.run.out

    def _dispatch(self, event: e.AnyEvent) -> None:
        match event:
            # What comes most often is looked for first.
            case e.Reported():
                self._workers.reported(event)
            case e.TimerFired():
                self._timer_fired(event)
            case e.RunOpened():
                self._open(event)
            case e.LeaseLost():
                self._fenced(event)
            case e.StopRequested():
                self._ending.stop_requested(event)
            case e.StorageLost():
                self._ending.storage_lost()
            case e.CapacityChanged():
                self._hosts.changed(event)
            case e.Reserved():
                self._hosts.reserved(event)
            case e.ReservationFailed():
                self._hosts.not_reserved(event)
            case e.HostPrepared():
                self._hosts.prepared(event)
            case e.HostUnprepared():
                self._hosts.unprepared(event)
            case e.HostLost():
                self._hosts.lost_one(event)
            case e.PreemptionNotice():
                self._moving.noticed(event)
            case e.NoticeCancelled():
                self._moving.cancelled(event)
            case e.WorkerSpawned():
                self._workers.spawned(event)
            case e.WorkerReady():
                self._workers.ready(event)
            case e.WorkerFailed():
                self._workers.failed(event)
            case e.WorkerReturned():
                self._workers.returned(event)
            case e.UploadFailed():
                self._workers.upload_failed(event)
            case e.WorkersGone():
                self._workers.gone(event)
            case e.WorkersQuiet():
                self._hangs.quiet(event)
            case e.WorkersExamined():
                self._hangs.examined(event)
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
            run.relocation.notices.recall(event.notices, used, event.at)
        run.do(c.RequestCapacity(self.settings.workers_max))
        if event.adopted is not None:
            self._adopt(event.adopted, event.at)
            return
        if event.remains is not None:
            run.fleet.held = {*event.remains.slices}
            if self.settings.group_size is None:
                run.snapshots.adopt(dict(event.remains.places), event.remains.copies)
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
        run.trains_since = at
        run.relocation.started(at)
        if self.settings.group_size is None:
            members = {a.rank: a.host for a in adopted.assignments}
            run.pass_on(run.snapshots.adopt(members, adopted.copies))
        gone = [(host, name) for host, name in sorted(slice_of.items()) if not run.fleet.alive(host)]
        self._hosts.lost([Lost(host, name, unlisted(host, at)) for host, name in gone], at)
        if not run.relocation.outdated and not any(restart.full for restart in run.restarts):
            self._recovery.find_places(at)
        self._moving.reconsider(at)

    def _fenced(self, event: e.LeaseLost) -> None:
        # A fenced driver changes nothing: no stop, no release. Who has the lease now owns all of it.
        self.run.phase = Phase.ENDED
        self.run.restarts.clear()
        self.run.do(c.EndRun(Outcome.FENCED, None, (), event.holder))

    # ------------------------------------------------------------------ checkpoints

    def _checkpoint_committed(self, event: e.CheckpointCommitted) -> None:
        run, at = self.run, event.at
        held = run.is_held(event.folder)
        ref = run.checkpoints.committed(event.folder, event.state)
        if ref is None:
            return
        run.do(c.CheckpointKept(at, ref.folder, ref.epoch, ref.index, ref.group, ref.generation))
        if ref.epoch != run.epoch:
            return
        self._recovery.progressed()
        if run.relocation.saved(run.groups, at):
            self._moving.reconsider(at, just_saved=True)
        if held and run.phase is Phase.RUNNING and not run.restarts:
            self._moving.change_over(run.relocation.change_over(run.groups, at), at)

    def _commit_failed(self, event: e.CommitFailed) -> None:
        """Its folder stays as it is: what can't be committed by us may be somebody else's."""
        self.run.is_held(event.folder)
        if self.run.checkpoints.failed(event.folder) and event.cause is not None:
            self.run.do(c.FailureSeen(event.at, event.cause))
            self._ending.refuse(event.cause, event.at)

    # ------------------------------------------------------------------ timers

    def _timer_fired(self, event: e.TimerFired) -> None:
        at = event.at
        match event.timer:
            case TimerName.GROW:
                self._moving.reconsider(at)
            case TimerName.BOUNDARY:
                self._moving.waited_for_boundary(at)
            case TimerName.MIGRATE:
                self._moving.alarm(at)
            case TimerName.RESERVE:
                reason = f"not granted within {self.settings.deadlines.reserve_s:g} s (Deadlines.reserve_s)"
                self._hosts.reservation_failed(event.key, reason, at)
            case TimerName.EXAMINE:
                self._hangs.time_is_up(event.key, at)
            case TimerName.PREPARE if event.key in self.run.relocation.standbys:
                self.run.relocation.failed(event.key, at)
            case TimerName.KILL if self.run.over:
                for host in self._ending.hosts:
                    self._hosts.unresponsive(host, at)
            case TimerName.UPLOAD if self.run.over:
                self._ending.uploads_took_too_long()
            case _:
                self._time_is_up(event)

    def _time_is_up(self, event: e.TimerFired) -> None:
        """For what a restart waits for. One that is over, or in another stage, has no use for it."""
        at = event.at
        restart = next((r for r in self.run.restarts if r.key == event.key), None)
        if restart is None:
            return
        match event.timer, restart.stage:
            case ((TimerName.SETTLE | TimerName.FINISH_REPORT), _):
                restart.stop_waiting_for(event.timer)
            case TimerName.KILL, _:
                for host in sorted(restart.stopping):
                    self._hosts.unresponsive(host, at)
            case TimerName.UPLOAD, _:
                self._recovery.stop_waiting_for_uploads(restart, at)
            case TimerName.BACKOFF, Phase.BACKOFF:
                self._recovery.placing.place(restart, at)
            case TimerName.PREPARE, Phase.PLACING:
                self._hosts.prepare_timed_out(restart, at)
            case TimerName.START, Phase.STARTING:
                self._recovery.start_timed_out(restart, at)
            case TimerName.SAY_SHORTAGE, Phase.WAITING:
                self._recovery.placing.say_shortage(restart, at)
