"""Events about workers and their checkpoints: workers start, report, return, fail, hang, and are gone.

Who hangs is judged in ``everstep.health``, by values alone.
"""

from __future__ import annotations

from everstep.control import commands as c, ending, events as e, moving, recovery, starting
from everstep.control.group import Group
from everstep.control.run import HangCheck, Run
from everstep.control.table import Phase
from everstep.failures import Failure, Kind
from everstep.health.hangs import HangVerdict, OnHang
from everstep.health.vitals import Finding
from everstep.health.watch import quiet_for
from everstep.saved.snapshots import At


def spawned(run: Run, group: Group, event: e.WorkerSpawned) -> None:
    if (restart := starting.restart_of(run, group)) is not None:
        restart.account.spawned = run.now


def ready(run: Run, group: Group, event: e.WorkerReady) -> None:
    restart = starting.restart_of(run, group)
    if restart is None:
        return
    group.ready.add(event.rank)
    if any(run.groups[g].ready != run.groups[g].ranks for g in restart.groups):
        return
    starting.all_ready(run, restart)
    moving.postpone_growth(run)
    if restart.full:
        recovery.find_places(run)


def reported(run: Run, group: Group, event: e.Reported) -> None:
    run.hangs.has_reported = True
    starting.stepped(run, group, event.rank, event.restore_s)
    _taken(run, event)
    saves = (*event.owed, *(part.index for part in event.parts))
    run.saved.checkpoints.reported(run.incarnation(group), saves, run.now)
    run.commit_complete(group, group.book.reported(event.rank, event.upto, event.owed, event.parts))


def _taken(run: Run, event: e.Reported) -> None:
    snapshots, epoch = run.saved.snapshots, event.epoch
    before = snapshots.kept
    taken = [At(epoch, index) for index in event.taken]
    taking = [At(epoch, index) for index in event.taking]
    run.send_verdicts(snapshots.reported(event.rank, At(epoch, event.upto), taken, run.now, taking))
    if snapshots.kept != before:
        run.budgets.backoff.progressed()


def upload_failed(run: Run, group: Group, event: e.UploadFailed) -> None:
    run.commit_complete(group, group.book.upload_failed(event.rank, event.index))


def returned(run: Run, group: Group, event: e.WorkerReturned) -> None:
    if event.rank in group.returned:
        return
    group.returned.add(event.rank)
    starting.stepped(run, group, event.rank, 0.0)
    run.send_verdicts(run.saved.snapshots.returned(event.rank))
    run.commit_complete(group, group.book.returned(event.rank))


def failed(run: Run, group: Group, event: e.WorkerFailed) -> None:
    if event.rank in group.returned or event.rank in group.gone:
        return
    group.failed.add(event.rank)
    failure = group.judge(event.failure, {event.rank})
    if failure.kind is Kind.LIMIT and not run.over:
        run.do(c.FailureSeen(run.now, failure))
        ending.give_up(run, failure)
        return
    if failure.kind is Kind.SIGNAL and group.members[event.rank].slice in run.fleet.noticed:
        # The machine that is being taken away ends its processes first.
        failure = failure.preempted()
    recovery.failed(run, failure, {group.number})


def gone(run: Run, event: e.WorkersGone) -> None:
    if event.epoch != run.epoch:
        return
    ending = {g for restart in run.restarts if restart.stage is not Phase.STARTING for g in restart.groups}
    silent: list[tuple[int, Group]] = []
    """Ranks that have not returned, and that nobody ended. The group of one that has reported a failure is in
    ``ending`` already.
    """
    for group in run.groups.values():
        if group.generation == event.generation:
            ranks = event.ranks & group.left_on(event.host)
            group.gone |= ranks
            silent += [(rank, group) for rank in ranks - group.returned if group.number not in ending]
    if silent and not run.over:
        rank, group = min(silent, key=lambda one: one[0])
        message = "exited without reporting a result or an error"
        failure = Failure(Kind.EXIT, run.now, message, rank=rank, host=event.host)
        recovery.failed(run, group.judge(failure, {rank}), {group.number})


# ---------------------------------------------------------------------- checkpoints


def committed(run: Run, event: e.CheckpointCommitted) -> None:
    held = run.saved.checkpoints.is_held(event.folder)
    ref = run.saved.checkpoints.committed(event.folder, event.state)
    if ref is None:
        return
    run.do(c.CheckpointKept(run.now, ref.folder, ref.epoch, ref.index, ref.group, ref.generation))
    if ref.epoch == run.epoch:
        run.budgets.backoff.progressed()
        moving.checkpoint_committed(run, held)


def commit_failed(run: Run, event: e.CommitFailed) -> None:
    """Its folder stays as it is: it may be another driver's."""
    if run.saved.checkpoints.failed(event.folder) and event.cause is not None:
        run.do(c.FailureSeen(run.now, event.cause))
        ending.refuse(run, event.cause)


def checkpoint_gone(run: Run, event: e.CheckpointGone) -> None:
    run.saved.checkpoints.forget(event.folder)


# ---------------------------------------------------------------------- hangs


def quiet(run: Run, event: e.WorkersQuiet) -> None:
    """These workers have made no progress for some time, which may well be right."""
    for vitals in event.vitals:
        group = run.group_of(vitals.rank) if event.epoch == run.epoch else None
        if group is None or group.generation != vitals.generation or not run.trains(group):
            continue
        of = run.incarnation(group)
        commits = bool(run.saved.checkpoints.committing(of))
        if group.number not in run.hangs.checks and run.hangs.needs_check(of, vitals, run.now, commits):
            _check(run, group, vitals.rank)


def _check(run: Run, group: Group, rank: int) -> None:
    hosts = {host for other in run.groups.values() if run.trains(other) for host in other.hosts()}
    key, due = run.next_key(), {e.TimerName.EXAMINE: run.now + run.settings.deadlines.examine_s}
    run.hangs.checks[group.number] = HangCheck(key, run.incarnation(group), rank, hosts, due)
    for host in sorted(hosts):
        run.do(c.ExamineWorkers(host, run.epoch, key))


def examined(run: Run, event: e.WorkersExamined) -> None:
    for check in list(run.hangs.checks.values()):
        if check.key == event.check and event.host in check.awaited:
            check.awaited.discard(event.host)
            check.found += event.found
            if not check.awaited:
                conclude(run, check)


def conclude(run: Run, check: HangCheck) -> None:
    """Every host has answered, or time is up. A host that doesn't answer is left out; if it is lost, missing
    heartbeats will show that.
    """
    group = run.groups.get(check.of.group)
    del run.hangs.checks[check.of.group]
    if group is None or run.incarnation(group) != check.of or not run.trains(group):
        return  # something else has happened to it meanwhile
    found = _present(group, check.found)
    others = [other for other in run.groups.values() if other is not group]
    theirs = [f for other in others if run.trains(other) for f in _present(other, check.found)]
    verdict = run.hangs.judge(check.of, check.rank, found, theirs if others else None, run.now)
    if verdict is not None:
        _act(run, check, group, verdict, found)


def _act(run: Run, check: HangCheck, group: Group, verdict: HangVerdict, found: list[Finding]) -> None:
    rank, quiet_s, action = verdict.culprits[0], quiet_for(found), run.settings.on_hang
    if action is OnHang.RESTART and not run.hangs.have_begun(found):
        action = OnHang.WARN  # nothing says that this function ever reports
    if action is OnHang.WARN and run.hangs.is_warned(check.of, verdict, quiet_s):
        return
    stacks = f"hangs/{run.epoch:04d}-{check.key:04d}.txt"
    message = f"{verdict.why}; stacks of all ranks are in {stacks}"
    run.do(c.KeepStacks(stacks, tuple(found), verdict.culprits))
    run.do(c.HangSeen(run.now, run.epoch, verdict.culprits, message, stacks, action.value))
    if action is OnHang.WARN:
        return
    group.failed |= set(verdict.culprits)
    stack = next(f.stack for f in found if f.vitals.rank == rank)
    host, since = group.members[rank].host, run.now - quiet_s
    failure = Failure(Kind.HANG, since, message, rank=rank, host=host, traceback=stack)
    if action is OnHang.FAIL:
        run.do(c.FailureSeen(run.now, failure))
        ending.give_up(run, failure, why="FailureConfig(on_hang='fail')")
    else:
        recovery.failed(run, failure, {group.number})


def _present(group: Group, found: list[Finding]) -> list[Finding]:
    """Of the workers that the group has now."""
    present = group.ranks - group.gone
    return [f for f in found if f.vitals.rank in present and f.vitals.generation == group.generation]


def snapshot_damaged(run: Run, event: e.SnapshotDamaged) -> None:
    run.saved.snapshots.forget(event.snapshot)


def snapshot_copied(run: Run, event: e.SnapshotCopied) -> None:
    if run.phase is Phase.NEW:
        return  # an earlier driver asked for it: what else the host has, which must stay, isn't known yet
    run.send_verdicts(run.saved.snapshots.copied(event.host, event.rank, event.snapshot, failed=event.failed))
