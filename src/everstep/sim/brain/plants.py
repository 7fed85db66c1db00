"""Known mistakes, each of which somebody has made in the field, put into a copy of the brain.

They show that the simulator would find them: ``everstep sim-check --plant NAME``. A plant replaces one
method of the brain for as long as it is in; production never imports this module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from everstep.control import commands as c, events as e, fleet, hangs, placing, watch
from everstep.control.budgets import Backoff
from everstep.control.checkpoints import Checkpoints
from everstep.control.commands import Outcome
from everstep.control.controller import Controller
from everstep.control.deadlines import Deadlines
from everstep.control.failures import Failure, Incident, Kind
from everstep.control.fleet import Fleet
from everstep.control.group import Group
from everstep.control.hosts import Hosts, Lost
from everstep.control.recovery import Recovery
from everstep.control.reports import ReportBook
from everstep.control.restart import Restart
from everstep.control.run import Run
from everstep.control.snapshots import At, Snapshots, Verdict
from everstep.control.table import Phase
from everstep.control.vitals import Vitals
from everstep.control.watch import HangWatch
from everstep.topology import placement
from everstep.topology.placement import Assignment, Placement
from everstep.topology.slices import HostId, HostView, Slice, by_slice


class Plant(msgspec.Struct, frozen=True):
    name: str
    mistake: str
    where: tuple[object, ...]
    """The classes or modules in which the attribute is replaced."""
    attribute: str
    wrong: object
    """What takes its place."""


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    """The brain has this mistake inside the block."""
    if plant is None:
        yield
        return
    right = [getattr(place, plant.attribute) for place in plant.where]
    for place in plant.where:
        setattr(place, plant.attribute, plant.wrong)
    try:
        yield
    finally:
        for place, was in zip(plant.where, right, strict=True):
            setattr(place, plant.attribute, was)


# ---------------------------------------------------------------------- the mistakes


def _replace_forever(self: Recovery, restart: Restart, failure: Failure, at: float) -> None:
    run = self._run
    restart.incident = Incident(failure, at)
    restart.attempts += 1
    run.cancel_timers(restart)
    run.withdraw(restart)
    # No limit on attempts: a replacement that fails is tried again, and never leads up the ladder.
    if restart.stage is Phase.STARTING:
        self.stop(restart, at)
    else:
        self._decide(restart, at)


_stop_workers = Recovery._stop_workers


def _orphan_half(self: Recovery, restart: Restart, at: float) -> None:
    if not restart.full and restart.attempts:
        for number in restart.groups:
            group = self._run.groups[number]
            # Only those that got to train are thought of; whoever was still joining is left to itself.
            group.gone |= group.ranks - group.ready
    _stop_workers(self, restart, at)


def _live_hosts(hosts: Iterable[HostView]) -> list[Slice]:
    """So many hosts live, so there must be so many slices: which of them are whole isn't looked at."""
    grouped = by_slice(hosts)
    living = {name: tuple(h for h in found if h.alive) for name, found in grouped.items()}
    return [Slice(name, found) for name, found in living.items() if found]


def _count_before_release(self: Fleet) -> list[Slice]:
    """What the old worker group still holds counts as in use, though it is about to let go."""
    return [s for s in self._whole_slices() if s.name not in self.broken and s.name not in self.held]


def _reservation_is_fatal(self: Hosts, reservation: int, reason: str, at: float) -> None:
    run = self._run
    if reservation in run.relocation.standbys:
        run.relocation.failed(reservation, at)
        return
    for restart in list(run.restarts):
        if restart.reservation == reservation:
            failure = Failure(Kind.RESERVATION, at, reason)
            self._ending._begin(c.EndRun(Outcome.FAILED, failure, (failure,), reason), 0.0, at)
            return


_hosts_lost = Hosts.lost


def _wrong_budget(self: Hosts, lost: Collection[Lost], at: float) -> None:
    noticed, self._run.fleet.noticed = self._run.fleet.noticed, {}
    try:
        _hosts_lost(self, lost, at)  # as if there had been no notice
    finally:
        self._run.fleet.noticed = noticed


def _commit_early(self: ReportBook, rank: int, index: int) -> bool:
    """A part that is announced counts as brought."""
    return self._upto[rank] >= index or rank in self._returned


def _accept_stale(self: Run, event: e.WorkerEvent) -> Group | None:
    """Whoever has the rank speaks for it, of whichever epoch and generation."""
    return self.group_of(event.rank)


def _fenced_acts(self: Controller, event: e.LeaseLost) -> None:
    """The user is told, and the brain goes on as if the run were still its own."""
    self.run.do(c.EndRun(Outcome.FENCED, None, (), event.holder))


def _release_twice(self: Fleet, slices: Iterable[str]) -> None:
    names = tuple(sorted(self.held & set(slices)))
    if names:
        # Given back, and still on the list of what is held.
        self.broken -= set(names)
        for host in self.hosts.values():
            if host.slice in names:
                self.forget(host.id)
        self._do(c.Release(names))


def _no_pause(self: Backoff, at: float) -> float:
    return 0.0


_assign_ranks = placement.assign_ranks


def _sparse_ranks(placement: Placement, group_size: int | None, wanted: int) -> tuple[Assignment, ...]:
    """Ranks by the number in the slice's name: whoever stays keeps its rank; a lost slice leaves a hole."""
    dense = _assign_ranks(placement, group_size, placement.world_size)
    first, width = {}, 0
    for number, name in enumerate(sorted({a.slice for a in dense}, key=lambda n: int(n.split("-")[1]))):
        members = [a for a in dense if a.slice == name]
        width = max(width, len(members))
        first[name] = (int(name.split("-")[1]) - number) * width
    lowest = min(first.values())
    return tuple(msgspec.structs.replace(a, rank=a.rank + first[a.slice] - lowest) for a in dense)


def _keep_own(
    self: Snapshots, rank: int, at: At, copied: Collection[At], now: float, copying: Collection[At] = ()
) -> list[Verdict]:
    """Each rank keeps its own newest, and writes over the one before: others may not have the newest yet."""
    found = _reported(self, rank, at, copied, now, copying)
    return found or [Verdict((rank,), newest, newest) for newest in copied]


def _first_is_enough(self: Snapshots, at: At) -> bool:
    """A snapshot counts as whole once some rank has it."""
    return bool(self._holders[at])


def _attempts_mixed(self: Snapshots, members: Mapping[int, HostId]) -> At | None:
    """What ranks have of an attempt that is over counts as of the next one: the reports have its numbers."""
    holders = {At(at.epoch + 1, at.report): {*ranks} for at, ranks in self._holders.items()}
    kept = _begin(self, members)
    self._holders = holders
    return kept


def _memory_first(self: Checkpoints, snapshot: At) -> bool:
    """What is in memory is restored, however long nobody has copied anything there."""
    return False


_reported = Snapshots.reported
_begin = Snapshots.begin


def _quiet_is_hung(vitals: Vitals, limits: Deadlines) -> bool:
    """Whoever says nothing for a while hangs: one time limit, whatever it may be doing."""
    return vitals.quiet_s >= limits.hang_s


_trains = HangWatch._trains


def _watch_the_first(self: HangWatch, group: Group) -> bool:
    """What the watch knows of the first workers stays, and stands for those that come after them."""
    return self._run.epoch == 1 and group.generation == 0 and _trains(self, group)


PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "replace-forever",
            "a replica group whose replacement fails is replaced again and again",
            (Recovery,),
            "start_failed",
            _replace_forever,
        ),
        Plant(
            "orphaned-workers",
            "workers of a replacement that fails half-way are left running",
            (Recovery,),
            "_stop_workers",
            _orphan_half,
        ),
        Plant(
            "live-hosts",
            "live hosts are counted, not whole free slices",
            (fleet,),
            "whole_slices",
            _live_hosts,
        ),
        Plant(
            "counted-too-early",
            "capacity is counted before the old worker group let go",
            (Fleet,),
            "_usable",
            _count_before_release,
        ),
        Plant(
            "fatal-timeout",
            "a reservation that times out ends the run",
            (Hosts,),
            "reservation_failed",
            _reservation_is_fatal,
        ),
        Plant(
            "wrong-budget",
            "the loss of a preempted host spends the budget for failures",
            (Hosts,),
            "lost",
            _wrong_budget,
        ),
        Plant(
            "early-commit",
            "a checkpoint is committed before its shards are there",
            (ReportBook,),
            "_settled",
            _commit_early,
        ),
        Plant(
            "stale-report",
            "reports of workers that were replaced are accepted",
            (Run,),
            "current",
            _accept_stale,
        ),
        Plant(
            "fenced-driver",
            "a driver that has lost the run goes on acting",
            (Controller,),
            "_fenced",
            _fenced_acts,
        ),
        Plant("double-release", "a slice is given back twice", (Fleet,), "release", _release_twice),
        Plant("no-backoff", "retries follow each other without a pause", (Backoff,), "next_pause", _no_pause),
        Plant(
            "buffer-reused",
            "a snapshot is written over before its successor is whole everywhere",
            (Snapshots,),
            "reported",
            _keep_own,
        ),
        Plant(
            "different-steps",
            "ranks are restored from snapshots that not all of them have",
            (Snapshots,),
            "_is_whole",
            _first_is_enough,
        ),
        Plant(
            "attempts-mixed",
            "snapshots of two attempts count as one",
            (Snapshots,),
            "begin",
            _attempts_mixed,
        ),
        Plant(
            "slow-is-hung",
            "a worker that is busy for longer than a fixed time is taken for one that hangs",
            (hangs, watch),
            "is_overdue",
            _quiet_is_hung,
        ),
        Plant(
            "missed-hang",
            "workers that hang after a restart are not looked at",
            (HangWatch,),
            "_trains",
            _watch_the_first,
        ),
        Plant(
            "memory-first",
            "a snapshot is restored that is older than a committed checkpoint",
            (Checkpoints,),
            "holds_newer",
            _memory_first,
        ),
        Plant(
            "sparse-ranks",
            "ranks are not dense after a shrink",
            (placing,),
            "assign_ranks",
            _sparse_ranks,
        ),
    )
}
