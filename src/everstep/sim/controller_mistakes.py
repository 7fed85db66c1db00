"""Mistakes in the controller, each of which somebody has made in the field."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from everstep.backoff import Backoff
from everstep.control import (
    commands as c,
    ending,
    events as e,
    fleet,
    hosts,
    moving,
    recovery,
    starting,
)
from everstep.control.commands import Outcome
from everstep.control.controller import HANDLERS
from everstep.control.fleet import Fleet
from everstep.control.group import Group
from everstep.control.hosts import LostHost
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.deadlines import Deadlines
from everstep.failures import Failure, Kind
from everstep.health import hangs, watch
from everstep.health.vitals import Vitals
from everstep.saved.checkpoints import Checkpoints
from everstep.saved.reports import ReportBook
from everstep.saved.snapshots import At, Snapshots, Transfer, Verdict
from everstep.sim.planting import Mistake, with_faults
from everstep.sim.scenario import FaultKind, Scenario
from everstep.topology import placement
from everstep.topology.placement import Assignment, Placement
from everstep.topology.slices import HostId, HostView, Slice, SliceName, by_slice


def _replace_forever(run: Run, restart: Restart) -> bool:
    # No limit on attempts: a replacement that fails is tried again, and never leads up the ladder.
    return not restart.full and restart.is_ending and run.restarting >= run.groups.keys()


_has_stopped = recovery._has_stopped


def _orphan_half(run: Run, restart: Restart) -> bool:
    if not restart.full and restart.attempts:
        for number in restart.groups:
            group = run.groups[number]
            # Only those that got to train are ended; those that were still joining are left running.
            group.gone |= group.ranks - group.ready
    return _has_stopped(run, restart)


def _live_hosts(hosts: Iterable[HostView]) -> list[Slice]:
    """Slices are counted by their live hosts, and not by whether they are whole."""
    grouped = by_slice(hosts)
    living = {name: tuple(h for h in found if h.alive) for name, found in grouped.items()}
    return [Slice(name, found) for name, found in living.items() if found]


def _count_before_release(self: Fleet) -> list[Slice]:
    """What the old worker group still holds counts as in use, though it is about to let go."""
    return [s for s in self._whole_slices() if s.name not in self.broken and s.name not in self.held]


def _reservation_is_fatal(run: Run, reservation: int, reason: str) -> None:
    if reservation in run.moving.standbys:
        moving.drop(run, [reservation])
    elif any(restart.reservation == reservation for restart in run.restarts):
        ending.give_up(run, Failure(Kind.RESERVATION, run.now, reason), why=reason)


_hosts_lost = hosts.lost


def _wrong_budget(run: Run, gone: Collection[LostHost]) -> None:
    noticed, run.fleet.noticed = run.fleet.noticed, {}
    try:
        _hosts_lost(run, gone)  # as if there had been no notice
    finally:
        run.fleet.noticed = noticed


def _commit_early(self: ReportBook, rank: int, index: int) -> bool:
    """A part that is announced counts as brought."""
    return self._upto[rank] >= index or rank in self._returned


def _fenced_acts(run: Run, event: e.LeaseLost) -> None:
    """The user gets the error, and the controller goes on as if the run were still its own."""
    run.do(c.EndRun(Outcome.FENCED, None, (), event.holder))


def _release_twice(self: Fleet, names: Collection[str]) -> list[HostId]:
    # Given back, and still on the list of what is held.
    self.broken -= set(names)
    for host in self.hosts.values():
        if host.slice in names:
            self.forget(host.id)
    return []


def _no_pause(self: Backoff, at: float) -> float:
    return 0.0


_assign_ranks = placement.assign_ranks


def _sparse_ranks(placement: Placement, group_size: int | None, wanted: int) -> tuple[Assignment, ...]:
    """Ranks by the number in the slice's name: workers that stay keep theirs; a lost slice leaves a hole."""
    dense = _assign_ranks(placement, group_size, placement.world_size)
    first, width = {}, 0
    for number, name in enumerate(sorted({a.slice for a in dense}, key=lambda n: int(n.split("-")[1]))):
        members = [a for a in dense if a.slice == name]
        width = max(width, len(members))
        first[name] = (int(name.split("-")[1]) - number) * width
    lowest = min(first.values())
    return tuple(msgspec.structs.replace(a, rank=a.rank + first[a.slice] - lowest) for a in dense)


def _keep_own(
    self: Snapshots, rank: int, at: At, taken: Collection[At], now: float, taking: Collection[At] = ()
) -> list[Verdict | Transfer]:
    """Each rank keeps its own newest, and writes over the one before: others may not have the newest yet."""
    found = _reported(self, rank, at, taken, now, taking)
    return found or [Verdict((rank,), (newest,), newest) for newest in taken]


def _first_is_enough(self: Snapshots, at: At) -> bool:
    """A snapshot counts as whole once some rank has it."""
    return any(self._known[at].holders.values())


def _copies_count_on_themselves(
    self: Snapshots, host: HostId, rank: int, at: At, *, failed: bool
) -> list[Verdict | Transfer]:
    """A copy counts as soon as it was asked for, also one that could not be made."""
    return _copied(self, host, rank, at, failed=False)


def _copies_of_the_lost(self: Snapshots, host: HostId) -> None:
    """What a lost host had for others is counted on: only its own ranks' snapshots are given up."""
    mine = {rank for rank, where in self._members.items() if where == host}
    for snapshot in self._known.values():
        for rank in mine:
            snapshot.holders.get(rank, set()).discard(host)
    self.kept_all = tuple(at for at in self.kept_all if self._is_whole(at))


def _attempts_mixed(
    self: Snapshots, members: Mapping[int, HostId], slices: Mapping[HostId, SliceName]
) -> At | None:
    """What ranks have of an attempt that is over counts as of the next one: the reports have its numbers."""
    known = {At(at.epoch + 1, at.report): s for at, s in self._known.items() if at not in self.kept_all}
    kept = _begin(self, members, slices)
    self._known.update(known)
    return kept


def _memory_first(self: Checkpoints, snapshot: At) -> bool:
    """What is in memory is restored, however long nobody has copied anything there."""
    return False


_reported = Snapshots.reported
_begin = Snapshots.begin
_copied = Snapshots.copied


def _quiet_is_hung(vitals: Vitals, limits: Deadlines) -> bool:
    """A silent worker hangs: one time limit, for anything that it may be doing."""
    return vitals.quiet_s >= limits.hang_s


_trains = Run.trains


def _watch_the_first(self: Run, group: Group) -> bool:
    """What the watch knows of the first workers stays, and stands for those that come after them."""
    return self.epoch == 1 and group.generation == 0 and _trains(self, group)


def _with_replacements_that_fail(scenario: Scenario) -> bool:
    return scenario.settings.group_size is not None and FaultKind.START in scenario.families


def _with_replacements_that_fail_often(scenario: Scenario) -> bool:
    """Three times in a row."""
    often = scenario.refused_reservation > 0.3 or scenario.failed_rendezvous > 0.2
    return scenario.settings.group_size is not None and often


def _with_snapshots(scenario: Scenario) -> bool:
    return scenario.snapshots


def _with_copies(scenario: Scenario) -> bool:
    return scenario.snapshots and scenario.settings.snapshot_copies > 0


def _with_slow_steps(scenario: Scenario) -> bool:
    return FaultKind.HANG in scenario.families and scenario.step_s > scenario.deadlines.hang_s


MISTAKES = (
    Mistake(
        "replace-forever",
        "a replica group whose replacement fails is replaced again and again",
        (recovery,),
        "_is_too_much",
        _replace_forever,
        _with_replacements_that_fail_often,
    ),
    Mistake(
        "orphaned-workers",
        "workers of a replacement that fails half-way are left running",
        (recovery,),
        "_has_stopped",
        _orphan_half,
        _with_replacements_that_fail,
    ),
    Mistake(
        "live-hosts",
        "live hosts are counted, not whole free slices",
        (fleet,),
        "whole_slices",
        _live_hosts,
    ),
    Mistake(
        "counted-too-early",
        "capacity is counted before the old worker group let go",
        (Fleet,),
        "_usable",
        _count_before_release,
    ),
    Mistake(
        "fatal-timeout",
        "a reservation that times out ends the run",
        (hosts,),
        "reservation_failed",
        _reservation_is_fatal,
        with_faults(FaultKind.RESERVE),
    ),
    Mistake(
        "wrong-budget",
        "the loss of a preempted host spends the budget for failures",
        (hosts,),
        "lost",
        _wrong_budget,
        with_faults(FaultKind.PREEMPT),
    ),
    Mistake(
        "early-commit",
        "a checkpoint is committed before its shards are there",
        (ReportBook,),
        "_settled",
        _commit_early,
    ),
    Mistake(
        "fenced-driver",
        "a driver that has lost the run goes on acting",
        (HANDLERS,),
        e.LeaseLost,
        _fenced_acts,
        with_faults(FaultKind.DRIVER),
    ),
    Mistake("double-release", "a slice is given back twice", (Fleet,), "give_back", _release_twice),
    Mistake("no-backoff", "retries follow each other without a pause", (Backoff,), "next_pause", _no_pause),
    Mistake(
        "buffer-reused",
        "a snapshot is written over before its successor is whole everywhere",
        (Snapshots,),
        "reported",
        _keep_own,
        _with_snapshots,
    ),
    Mistake(
        "different-steps",
        "ranks are restored from snapshots that not all of them have",
        (Snapshots,),
        "_is_whole",
        _first_is_enough,
        _with_snapshots,
    ),
    Mistake(
        "copies-unmade",
        "a copy on another host is counted on that was never made",
        (Snapshots,),
        "copied",
        _copies_count_on_themselves,
        _with_copies,
    ),
    Mistake(
        "copies-lost",
        "copies are counted on that were on a lost host",
        (Snapshots,),
        "host_lost",
        _copies_of_the_lost,
        _with_copies,
    ),
    Mistake(
        "attempts-mixed",
        "snapshots of two attempts count as one",
        (Snapshots,),
        "begin",
        _attempts_mixed,
        _with_snapshots,
    ),
    Mistake(
        "slow-is-hung",
        "a worker that is busy for longer than a fixed time is taken for one that hangs",
        (hangs, watch),
        "is_overdue",
        _quiet_is_hung,
        _with_slow_steps,
    ),
    Mistake(
        "missed-hang",
        "workers that hang after a restart are not looked at",
        (Run,),
        "trains",
        _watch_the_first,
        with_faults(FaultKind.HANG),
    ),
    Mistake(
        "memory-first",
        "a snapshot is restored that is older than a committed checkpoint",
        (Checkpoints,),
        "holds_newer",
        _memory_first,
        _with_snapshots,
    ),
    Mistake(
        "sparse-ranks",
        "ranks are not dense after a shrink",
        (starting,),
        "assign_ranks",
        _sparse_ranks,
    ),
)
