"""Which workers that an earlier driver left behind can go on, and what is left of the others in memory.

A take-over keeps whole replica groups; without such groups that means all workers or none. A slice is kept
or ended as a whole. A group is kept only if all of its ranks are of the last incarnation that was begun: a
host that was lost, and whose workers were replaced, may be back with the old ones.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName


class LeftWorker(msgspec.Struct, frozen=True):
    """A worker of an earlier driver, as the agent of its host knows it. It may have ended since."""

    host: HostId
    epoch: int
    generation: int
    place: Assignment
    has_joined: bool
    """Its group has met, and it trains or has trained."""
    was_told_to_end: bool = False
    has_returned: bool = False

    @property
    def rank(self) -> int:
        return self.place.rank


class Unfit(enum.Enum):
    """Why a rank can't go on."""

    OVER = "came from an attempt that was over"
    REPLACED = "had been replaced"
    GONE = "could not be found"
    TOLD_TO_END = "had been told to end"
    NOT_JOINED = "had not joined yet"
    """A group that was still meeting waits for messages of a driver that is dead."""


class Survivors(msgspec.Struct, frozen=True):
    """The workers of the newest attempt: each is kept or ended."""

    epoch: int = 0
    """Their attempt."""
    kept: tuple[LeftWorker, ...] = ()
    """By rank. Whole groups in whole slices."""
    ended: tuple[LeftWorker, ...] = ()
    """By rank: the others, of groups with a rank that can't go on, or that share a slice with such groups."""
    superseded: tuple[LeftWorker, ...] = ()
    """Of earlier attempts and incarnations, whose ranks others have now. They end, whoever is kept."""
    unfit: tuple[tuple[Unfit, tuple[int, ...]], ...] = ()
    """The ranks that can't go on."""
    unanswered: tuple[HostId, ...] = ()
    """Hosts that have not told all that they have."""
    generations: tuple[tuple[int, int], ...] = ()
    """The last incarnation that was begun, by replica group, where one is known."""

    @property
    def everybody(self) -> list[LeftWorker]:
        return sorted((*self.kept, *self.ended), key=lambda worker: worker.rank)

    @property
    def kept_hosts(self) -> set[HostId]:
        return {worker.host for worker in self.kept}


def choose(
    left: Iterable[LeftWorker],
    last_epoch: int,
    begun: Mapping[tuple[int, int], int],
    unanswered: Collection[HostId],
) -> Survivors:
    """``left``: what the agents have, in the order in which they told it. ``last_epoch``: the last attempt
    that was begun; workers of an earlier one were about to be ended. ``begun``: the last incarnation that was
    begun, by attempt and replica group, of groups that were replaced.
    """
    everybody = [*left]
    workers = _newest(everybody)
    if not workers:
        return Survivors(unanswered=tuple(sorted(unanswered)))
    epoch = workers[0].epoch
    generations = {group: number for (of, group), number in begun.items() if of == epoch}
    for worker in workers:
        group = worker.place.group_id
        generations[group] = max(generations.get(group, 0), worker.generation)
    unfit = _unfit(workers, epoch < last_epoch, generations)
    size = workers[0].place.group_size
    broken = _with_shared_slices(workers, {rank // size for ranks in unfit.values() for rank in ranks})
    return Survivors(
        epoch,
        tuple(worker for worker in workers if worker.place.group_id not in broken),
        tuple(worker for worker in workers if worker.place.group_id in broken),
        tuple(sorted({*everybody} - {*workers}, key=lambda w: (w.epoch, w.generation, w.rank, w.host))),
        tuple((why, tuple(sorted(ranks))) for why, ranks in unfit.items() if ranks),
        tuple(sorted(unanswered)),
        tuple(sorted(generations.items())),
    )


def _newest(left: Iterable[LeftWorker]) -> list[LeftWorker]:
    """Of the newest attempt, the last worker of each rank, by rank."""
    newest: dict[tuple[int, int], LeftWorker] = {}
    for worker in left:
        known = newest.get((worker.epoch, worker.rank))
        if known is None or known.generation <= worker.generation:
            newest[worker.epoch, worker.rank] = worker
    epoch = max((epoch for epoch, _ in newest), default=0)
    return [worker for key, worker in sorted(newest.items()) if key[0] == epoch]


def _unfit(
    workers: Sequence[LeftWorker], is_over: bool, generations: Mapping[int, int]
) -> dict[Unfit, set[int]]:
    """Ranks that can't go on by themselves, whatever becomes of others. ``generations``: the last that were
    begun.
    """
    ranks = {worker.rank for worker in workers}
    replaced = {w.rank for w in workers if w.generation < generations[w.place.group_id]}
    told = {worker.rank for worker in workers if worker.was_told_to_end and not worker.has_returned}
    told -= replaced
    return {
        Unfit.OVER: ranks if is_over else set(),
        Unfit.REPLACED: replaced,
        Unfit.GONE: set(range(workers[0].place.world_size)) - ranks,
        Unfit.TOLD_TO_END: told,
        Unfit.NOT_JOINED: {worker.rank for worker in workers if not worker.has_joined} - told - replaced,
    }


def _with_shared_slices(workers: Sequence[LeftWorker], broken: Collection[int]) -> set[int]:
    """These groups, and all that share a slice with one of them, or with one of those. A slice on which
    workers are missing, or a host with all of its workers, is started anew as a whole.
    """
    places, groups = [worker.place for worker in workers], {*broken}
    on = Counter(a.host for a in places)
    hosts = Counter(name for name, _ in {(a.slice, a.host) for a in places})
    lacking = (a for a in places if on[a.host] < a.local_world_size or hosts[a.slice] < a.slice_hosts)
    spoilt = {a.slice for a in lacking}
    while True:
        spoilt |= {a.slice for a in places if a.group_id in groups}
        more = {a.group_id for a in places if a.slice in spoilt} - groups
        if not more:
            return groups
        groups |= more


def slices_to_restore(
    survivors: Survivors,
    there: Collection[HostId],
    slice_of: Mapping[HostId, SliceName],
    *,
    with_snapshots: Collection[HostId],
    still_ending: Collection[HostId],
) -> tuple[SliceName, ...]:
    """The slices that stay held because their hosts' memory can be restored from although no worker is kept:
    those of the hosts that are ``there``, have reported what they have, and have no worker left.
    """
    if survivors.kept:
        return ()
    ready = {*there}.difference(survivors.unanswered, still_ending)
    spoilt = {name for host, name in slice_of.items() if host not in ready}
    slices = {slice_of[host] for host in ready if host in slice_of} - spoilt
    found = any(slice_of.get(host) in slices for host in with_snapshots)
    return tuple(sorted(slices)) if found else ()
