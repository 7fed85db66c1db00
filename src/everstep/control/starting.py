"""From workers that are gone to workers that train: slices, prepared hosts, the start, the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.fleet import SliceReservation
from everstep.control.group import Group
from everstep.control.restart import NewPlace, Restart
from everstep.control.run import Run
from everstep.control.table import Phase
from everstep.topology.placement import Assignment, assign_ranks
from everstep.topology.slices import HostId, SliceName
from everstep.wording import named

# ---------------------------------------------------------------------- the place


def place(run: Run, restart: Restart) -> None:
    """Find hosts, and reserve what isn't held. Called again whenever capacity changed."""
    run.withdraw(restart.reservation)
    restart.place = NewPlace()
    _release_unused(run, restart, run.fleet.broken, set())
    taken = run.used_by_others(restart)
    restart.choose(_assign_all(run) if restart.full else assign_again(run, restart.groups, taken))
    if restart.place.assignments:
        run.enter_stage(restart, Phase.PLACING)
        restart.stop_waiting()
    elif restart.stage is not Phase.WAITING:
        run.enter_stage(restart, Phase.WAITING)
        restart.due[e.TimerName.REMEMBER] = run.now + run.settings.deadlines.memory_wait_s
        say_shortage(run, restart)
    # Its state is in the memory of these hosts. Another run may need them, so there is a time limit.
    remembering = run.saved.snapshots.hosts if e.TimerName.REMEMBER in restart.due else set()
    _release_unused(run, restart, run.fleet.held, remembering)
    missing = restart.place.slices - run.fleet.held
    restart.reservation = run.reserve(missing).key if missing else None


def _assign_all(run: Run) -> tuple[Assignment, ...]:
    found = run.fleet.place_all(run.now)
    return assign_ranks(found, run.settings.group_size, run.settings.workers_max) if found else ()


def assign_again(run: Run, groups: Collection[int], taken: Collection[SliceName]) -> tuple[Assignment, ...]:
    """Where these groups go while the others stay in the slices that are ``taken``."""
    everyone = [a for group in run.groups.values() for a in group.members.values()]
    moving = [a for number in sorted(groups) for a in run.groups[number].members.values()]
    return run.fleet.place_again(moving, everyone, taken, run.now)


def _release_unused(run: Run, restart: Restart, slices: set[SliceName], needed: set[HostId]) -> None:
    """Give back those of these slices that nobody uses, unless something is being uploaded from there or one
    of their hosts is ``needed``.
    """
    uploading = run.uploading(restart.groups) if restart.waits_for_uploads else frozenset()
    busy = {host.slice for host in run.fleet.hosts.values() if host.id in uploading.union(needed)}
    run.release(slices - run.used_by_others(restart) - restart.place.slices - busy)


def say_shortage(run: Run, restart: Restart) -> None:
    groups = named("replica group", sorted(restart.groups))
    who = f"at least {run.settings.start_min} workers" if restart.full else groups
    shortage = run.fleet.shortage(run.used_by_others(restart))
    run.do(c.Waiting(run.now, run.settings.start_min, f"need room for {who}; {shortage}"))
    restart.due[e.TimerName.SAY_SHORTAGE] = run.now + run.settings.deadlines.capacity_log_s


def retry_places(run: Run) -> None:
    """Find places for restarts that wait for one, or have lost the one that was planned."""
    fleet = run.fleet
    for restart in run.restarts:
        planned = restart.place
        kept = fleet.is_whole(planned.slices - fleet.held) and all(map(fleet.alive, planned.hosts))
        if restart.stage is Phase.WAITING or (restart.stage is Phase.PLACING and not kept):
            place(run, restart)


def prepare_hosts(run: Run) -> None:
    """Have every host prepared that workers will start on, with a time limit."""
    fleet = run.fleet
    placing = [restart for restart in run.restarts if restart.stage is Phase.PLACING]
    owners: list[Restart | SliceReservation] = [*placing, *run.moving.standbys.values()]
    for owner in owners:
        place, is_new = owner.place if isinstance(owner, Restart) else owner, False
        for host in sorted(place.hosts - fleet.prepared - fleet.preparing):
            if fleet.alive(host) and fleet.hosts[host].slice in fleet.held:
                fleet.preparing.add(host)
                run.do(c.PrepareHost(host))
                is_new = True
        if place.hosts <= fleet.prepared or not place.slices <= fleet.held:
            owner.due.pop(e.TimerName.PREPARE, None)
        elif is_new or e.TimerName.PREPARE not in owner.due:
            owner.due[e.TimerName.PREPARE] = run.now + run.settings.deadlines.prepare_s


def is_ready(run: Run, restart: Restart) -> bool:
    """Its workers can start: every host is there, and every commit is answered, so that the newest checkpoint
    is known.
    """
    return (
        restart.place.hosts <= run.fleet.prepared
        and restart.place.slices <= run.fleet.held
        and not run.saved.checkpoints.under_way(None if restart.full else restart.groups)
        and not restart.waits_for_uploads
    )


# ---------------------------------------------------------------------- the start


def start(run: Run, restart: Restart) -> None:
    new, account, saved = restart.place, restart.account, run.saved
    assert new.slices <= run.fleet.held, "workers start on reserved slices only"
    discard_open(run, restart.groups)
    generations = {} if restart.full else {g: run.groups[g].generation + 1 for g in restart.groups}
    account.rung = new.rung
    if run.settings.group_size is None:  # a group that is replaced takes its state from the others
        # Snapshots in slices that are given back are lost: they must not be counted on.
        run.release(run.fleet.held - run.used_by_others(restart) - new.slices)
        places = new.assignments
        account.snapshot = saved.in_memory(
            {a.rank: a.host for a in places}, {a.host: a.slice for a in places}
        )
    if restart.full:
        account.restores(*saved.describe(account.snapshot))
        account.steps_lost = saved.steps_lost(restart.before.epoch, restart.before.furthest, account.snapshot)
        run.epoch += 1
        run.groups.clear()
        run.moving.outdated = False
        run.moving.due.pop(e.TimerName.BOUNDARY, None)
    account.ordered = account.spawned = run.now
    run.make_groups((*new.assignments, *new.absent), generations)
    restart.groups = {a.group_id for a in new.assignments}
    run.release(run.fleet.held - run.used_by_others(restart) - new.slices)
    run.enter_stage(restart, Phase.STARTING)
    restart.due = {e.TimerName.START: run.now + run.settings.deadlines.start_s}
    started = _generations(run, restart)
    if not restart.full:
        run.do(c.GroupsStarting(run.now, run.epoch, started))
    newest = saved.checkpoints.newest
    folder = newest.folder if newest else None
    order = c.StartWorkers(run.epoch, started, new.assignments, folder, restart.reason)
    if (snapshot := account.snapshot) is not None:
        kept, sources = saved.snapshots.kept_all, saved.snapshots.sources(snapshot)
        order = msgspec.structs.replace(order, snapshot=snapshot, kept=kept, sources=sources)
    run.do(order)


def discard_open(run: Run, groups: Iterable[int]) -> None:
    """What dead ranks of these groups began and can't finish is garbage."""
    for number in groups:
        for folder in run.groups[number].book.open_folders.values():
            run.do(c.DiscardCheckpoint(folder))


def _generations(run: Run, restart: Restart) -> tuple[tuple[int, int], ...]:
    return tuple((g, run.groups[g].generation) for g in sorted(restart.groups))


def restart_of(run: Run, group: Group) -> Restart | None:
    """The restart that this group's workers are being started by."""
    starting = (restart for restart in run.restarts if restart.stage is Phase.STARTING)
    return next((restart for restart in starting if group.number in restart.groups), None)


def all_ready(run: Run, restart: Restart) -> None:
    """Every worker of this restart is ready."""
    account, newest = restart.account, run.saved.checkpoints.newest
    run.restarts.remove(restart)
    run.budgets.first_starts.over = True
    run.budgets.backoff.healthy(run.now)
    account.ready = run.now
    if restart.full:
        run.saved.trains_since = run.now
    run.enter_stage(restart, Phase.RUNNING)
    present = run.steady()
    world, slices = sum(len(g.ranks) for g in present), {name for g in present for name in g.slices()}
    rung, folder, snapshot = account.rung, newest.folder if newest else None, account.snapshot
    which = (_generations(run, restart), world, len(slices), rung, restart.reason)
    run.do(c.GroupStarted(run.now, run.epoch, *which, folder, snapshot is not None, snapshot))
    if rung is not c.Rung.FIRST_START:
        run.unproven.append(restart)


# ---------------------------------------------------------------------- the first step


def stepped(run: Run, group: Group, rank: int, restore_s: float) -> None:
    """The rank has reported for the first time since it started, or returned."""
    if rank in group.stepped:
        return
    group.stepped.add(rank)
    for restart in run.unproven:
        if group.number in restart.groups:
            restart.account.restore_s = max(restart.account.restore_s, restore_s)


def report_recovered(run: Run) -> None:
    """Once every rank of a restart has reported, say what the recovery cost."""
    for restart in list(run.unproven):
        if all(run.groups[g].stepped == run.groups[g].ranks for g in restart.groups):
            run.unproven.remove(restart)
            run.do(restart.account.recovered(run.now, run.epoch))


def forget_unproven(run: Run, groups: Collection[int]) -> None:
    """A recovery that fails before its first step is followed by another one, and only that is reported."""
    run.unproven = [restart for restart in run.unproven if restart.groups.isdisjoint(groups)]


def futile_replacements(run: Run, groups: Collection[int]) -> int:
    """How often in a row these groups were replaced without having trained in between.

    Trained: every rank has reported, or a healthy time has passed.
    """
    since = run.now - run.settings.deadlines.healthy_s
    young = [r for r in run.unproven if not r.groups.isdisjoint(groups) and r.account.ready > since]
    return max((r.attempts + 1 for r in young if not r.full), default=0)
