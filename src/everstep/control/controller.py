"""The controller of a run: events in, commands out.

This is the way in. Events about hosts are handled in ``hosts``, events about workers in ``workers``; how
failures lead back to training is in ``recovery`` and ``starting``, how a run ends in ``ending``, when to move
workers that could train on in ``moving``. All of them are functions over one ``Run``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.control import commands as c, ending, events as e, hosts, moving, recovery, starting, workers
from everstep.control.group import Group
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.settings import Settings
from everstep.control.table import Phase
from everstep.saved.checkpoints import Checkpoints
from everstep.topology.placement import groups_nowhere

__all__ = ["Controller", "Settings"]


class Controller:
    """``handle`` is the only way in. Time comes with the events, and commands come out."""

    def __init__(self, settings: Settings) -> None:
        self._run = run = Run(settings)
        self.groups: Mapping[int, Group] = run.groups
        self.group_of = run.group_of
        self.steady = run.steady
        self.restarts: Sequence[Restart] = run.restarts
        """Those under way."""
        self.hosts_held = run.fleet.hosts_held
        self._timers: dict[tuple[e.TimerName, int], float] = {}
        """Those that are set."""

    @property
    def phase(self) -> Phase:
        return self._run.phase

    @property
    def epoch(self) -> int:
        return self._run.epoch

    def committing(self, group: Group) -> set[int]:
        """Reports of this group whose checkpoints are being committed."""
        return self._run.saved.checkpoints.committing(self._run.incarnation(group))

    def handle(self, event: e.Event) -> list[c.AnyCommand]:
        """Take one event; return what is to be done now, in order."""
        run = self._run
        if self.phase is Phase.ENDED:
            return []
        run.now, run.out = event.at, []
        if isinstance(event, e.TimerFired):
            self._timers.pop((event.timer, event.key), None)
        if not isinstance(event, e.WorkerEvent):
            HANDLERS[type(event)](run, event)
        elif (group := run.group_for(event)) is not None:
            WORKER_HANDLERS[type(event)](run, group, event)
        if run.phase is Phase.ENDED:
            return run.out  # fenced: it changes nothing any more
        recovery.advance(run)
        if not isinstance(event, e.Reported):
            moving.reconsider(run)
            recovery.advance(run)
        ending.advance(run)
        starting.prepare_hosts(run)
        moving.set_notice_timer(run)
        _assert_invariants(run)
        return [*self._set_timers(), *run.out]

    def _set_timers(self) -> list[c.AnyCommand]:
        """Compare the timers that should be set with those that are."""
        wanted = {(timer, one.key): at for one in self._run.waiting() for timer, at in one.due.items()}
        before, self._timers = self._timers, wanted
        return [
            *(c.CancelTimer(*name) for name in before if name not in wanted),
            *(c.SetTimer(*name, at) for name, at in wanted.items() if before.get(name) != at),
        ]


def beliefs_of(controller: Controller) -> Run:
    """All that it believes: for checks by the simulator and by tests. Everything else reads the views."""
    return controller._run


def _assert_invariants(run: Run) -> None:
    covered = [g for restart in run.restarts for g in restart.groups]
    assert len(covered) == len(set(covered)), "a group is in two restarts"
    is_full, stages = any(restart.full for restart in run.restarts), [r.stage for r in run.restarts]
    assert not is_full or stages == [run.phase], "a full restart stands alone, and the run is in its phase"


def _open(run: Run, event: e.RunOpened) -> None:
    assert run.phase is Phase.NEW, "a run is opened once"
    run.epoch = event.last_epoch
    run.saved.checkpoints = Checkpoints(event.checkpoints, event.let_go)
    run.budgets.spent.update(event.spent)
    adopted, remains = event.adopted, event.remains
    moving.restore_notices(run, event.notices, {a.host for a in adopted.assignments} if adopted else ())
    run.do(c.RequestCapacity(run.settings.workers_max))
    if adopted is not None:
        _adopt(run, adopted)
        return
    if remains is not None:
        run.fleet.held = {*remains.slices}
        if run.settings.group_size is None:
            run.saved.snapshots.remain(remains.copies)
    reason = "resumed" if event.last_epoch else "first start"
    starting.place(run, recovery.begin(run, [], full=True, incident=None, reason=reason))


def _adopt(run: Run, adopted: e.Adopted) -> None:
    assert run.epoch <= adopted.epoch, "workers of an old epoch are not adopted"
    run.epoch = adopted.epoch
    absent = groups_nowhere(adopted.assignments, adopted.assignments[0].num_groups)
    run.make_groups((*adopted.assignments, *absent), dict(adopted.generations))
    for group in run.groups.values():
        group.ready = set() if group.nowhere else set(group.ranks)
    slice_of = {a.host: a.slice for a in adopted.assignments}
    run.fleet.held = set(slice_of.values())
    if adopted.outdated:
        # Nothing has the new code yet. An epoch never mixes two versions: whatever starts next is new.
        run.moving.outdated = True
        run.moving.due[e.TimerName.BOUNDARY] = run.now + run.settings.deadlines.boundary_s
    else:
        run.fleet.prepared = set(slice_of)
        run.budgets.first_starts.over = True
    run.set_phase(Phase.RUNNING)
    run.saved.trains_since = run.now
    moving.postpone_growth(run)
    if run.settings.group_size is None:
        members = {a.rank: a.host for a in adopted.assignments}
        run.send_verdicts(run.saved.snapshots.adopt(members, slice_of, adopted.copies))
    gone = [(host, name) for host, name in sorted(slice_of.items()) if not run.fleet.alive(host)]
    hosts.lost(run, [hosts.vanished(run, host, name) for host, name in gone])
    if not adopted.outdated and not any(restart.full for restart in run.restarts):
        recovery.find_places(run)


def _timer_fired(run: Run, event: e.TimerFired) -> None:
    """Time is up, for one that still waits. What needs nothing but that moves on by itself."""
    owner = next((o for o in run.waiting() if o.key == event.key and event.timer in o.due), None)
    if owner is None:
        return
    del owner.due[event.timer]
    if event.timer in TIMED_OUT:
        TIMED_OUT[event.timer](run, owner)


HANDLERS: dict[type[e.Event], Callable[[Run, Any], None]] = {
    e.RunOpened: _open,
    e.LeaseLost: ending.fenced,
    e.StopRequested: ending.stop_requested,
    e.StopAtCheckpointRequested: ending.stop_at_checkpoint,
    e.StorageLost: ending.storage_lost,
    e.CapacityChanged: hosts.capacity_changed,
    e.Reserved: hosts.reserved,
    e.ReservationFailed: hosts.not_reserved,
    e.HostPrepared: hosts.prepared,
    e.HostUnprepared: hosts.unprepared,
    e.HostLost: hosts.host_lost,
    e.PreemptionNotice: moving.noticed,
    e.NoticeCancelled: moving.cancelled,
    e.WorkersGone: workers.gone,
    e.WorkersQuiet: workers.quiet,
    e.WorkersExamined: workers.examined,
    e.CheckpointCommitted: workers.committed,
    e.SnapshotDamaged: workers.snapshot_damaged,
    e.SnapshotCopied: workers.snapshot_copied,
    e.CheckpointGone: workers.checkpoint_gone,
    e.CommitFailed: workers.commit_failed,
    e.TimerFired: _timer_fired,
}
"""What is done about each event; a test says that none is forgotten."""

WORKER_HANDLERS: dict[type[e.WorkerEvent], Callable[[Run, Group, Any], None]] = {
    e.WorkerSpawned: workers.spawned,
    e.WorkerReady: workers.ready,
    e.WorkerFailed: workers.failed,
    e.WorkerReturned: workers.returned,
    e.Reported: workers.reported,
    e.UploadFailed: workers.upload_failed,
}
"""The same for events of one worker. Stale ones are refused before: each handler gets the worker's group."""

TIMED_OUT: dict[e.TimerName, Callable[[Run, Any], None]] = {
    e.TimerName.RESERVE: hosts.reserve_timed_out,
    e.TimerName.PREPARE: hosts.prepare_timed_out,
    e.TimerName.START: recovery.start_timed_out,
    e.TimerName.KILL: hosts.unresponsive,
    e.TimerName.UPLOAD: recovery.stop_waiting_for_uploads,
    e.TimerName.SAY_SHORTAGE: starting.say_shortage,
    e.TimerName.REMEMBER: starting.place,
    e.TimerName.EXAMINE: workers.conclude,
    e.TimerName.LAST_CHECKPOINT: lambda run, _: ending.stop_now(run),
    e.TimerName.MIGRATE: lambda run, _: moving.review_notices(run),
}
"""What is done about whatever has waited too long. The other timers only end a wait."""
