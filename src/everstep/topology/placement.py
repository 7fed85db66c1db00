"""Which hosts a worker group gets, and which rank runs where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from everstep.topology.slices import HostId, HostView, Slice, SliceName, natural_key

_NOWHERE = "?"
"""What the names of hosts and slices begin with that don't exist. No label and no host name may."""


class Assignment(msgspec.Struct, frozen=True):
    """A worker's place: everything that depends on the whole group and not on the engine."""

    rank: int
    host: HostId
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    world_size: int
    slice: SliceName
    slice_id: int
    num_slices: int
    group_id: int
    num_groups: int
    group_rank: int
    group_size: int
    slice_hosts: int = 1
    """Of all hosts of its slice, those without a worker included: the shape of what it can move to."""

    @property
    def nowhere(self) -> bool:
        """A replica group for which there is no room is given slices that don't exist (their names begin with
        ``?``), so that it waits exactly like one whose slice was lost.
        """
        return self.slice.startswith(_NOWHERE)


class Placement(msgspec.Struct, frozen=True):
    """Whole slices, and how many workers each of their hosts gets."""

    slices: tuple[Slice, ...]
    workers: tuple[tuple[HostId, int], ...]
    """In rank order: host, number of workers."""

    @property
    def world_size(self) -> int:
        return sum(workers for _, workers in self.workers)

    @property
    def slice_names(self) -> frozenset[SliceName]:
        return frozenset(s.name for s in self.slices)


def plan(
    slices: Iterable[Slice],
    *,
    at_least: int,
    at_most: int,
    multiple_of: int = 1,
    prefer: Collection[SliceName] = (),
    avoid: Collection[SliceName] = (),
    spread: bool = False,
) -> Placement | None:
    """As many workers as fit in these whole slices, up to ``at_most``; None if that is below ``at_least``.

    Slices in ``prefer`` (held already) come first, so that a restart moves as little as it can. Slices in
    ``avoid`` (hosts that keep failing) are used only when the group would be smaller without them.
    """
    ordered = sorted(slices, key=lambda s: (s.name not in prefer, natural_key(s.name)))
    good = [s for s in ordered if s.name not in avoid]
    best = _fill(good, at_most, multiple_of, spread)
    if len(good) < len(ordered):
        bad = [s for s in ordered if s.name in avoid]
        with_all = _fill(good + bad, at_most, multiple_of, spread)
        if best is None or (with_all is not None and with_all.world_size > best.world_size):
            best = with_all
    if best is None or best.world_size < at_least:
        return None
    return best


def _fill(ordered: Sequence[Slice], at_most: int, multiple_of: int, spread: bool) -> Placement | None:
    """The largest number of workers that fits: wired slices whole or not at all, lone hosts take what is
    left.
    """
    wired = [s for s in ordered if not s.divisible]
    lone = [s.hosts[0] for s in ordered if s.divisible]
    room = sum(host.slots for host in lone)
    # Bit n of sums[i]: some of the slices from i on have n slots together.
    sums = [1] * (len(wired) + 1)
    limit = (1 << (max(at_most, 0) + 1)) - 1
    for i in range(len(wired) - 1, -1, -1):
        sums[i] = (sums[i + 1] | sums[i + 1] << wired[i].slots) & limit
    total = at_most - at_most % multiple_of
    while total > 0:
        whole = (sums[0] & ((1 << (total + 1)) - 1)).bit_length() - 1
        if total - whole <= room:
            break
        total -= multiple_of
    else:
        return None
    counts = _fill_lone(lone, total - whole, spread)
    for i, piece in enumerate(wired):
        if piece.slots <= whole and sums[i + 1] >> (whole - piece.slots) & 1:
            counts.update((host.id, host.slots) for host in piece.hosts)
            whole -= piece.slots
    used = sorted(
        (s for s in ordered if any(host.id in counts for host in s.hosts)), key=lambda s: natural_key(s.name)
    )
    workers = tuple((host.id, counts[host.id]) for s in used for host in s.hosts)
    return Placement(tuple(used), workers)


def _fill_lone(lone: Sequence[HostView], workers: int, spread: bool) -> dict[HostId, int]:
    counts: dict[HostId, int] = {}
    while workers:
        for host in lone:
            more = min(workers, host.slots - counts.get(host.id, 0), 1 if spread else host.slots)
            if more:
                counts[host.id] = counts.get(host.id, 0) + more
                workers -= more
    return counts


def assign_ranks(placement: Placement, group_size: int | None, wanted: int = 0) -> tuple[Assignment, ...]:
    """Ranks 0..N-1 by slice, then host index, then local rank; replica groups are runs of consecutive
    ranks. Groups for which there is no room, of ``wanted`` workers in all, are placed nowhere.
    """
    world = placement.world_size
    size = group_size or world
    assert world % size == 0, f"{world} workers don't divide into groups of {size}"
    slice_of = {host.id: (i, s.name) for i, s in enumerate(placement.slices) for host in s.hosts}
    out: list[Assignment] = []
    for node_rank, (host, workers) in enumerate(placement.workers):
        slice_id, name = slice_of[host]
        for local_rank in range(workers):
            rank = len(out)
            out.append(
                Assignment(
                    rank=rank,
                    host=host,
                    local_rank=local_rank,
                    local_world_size=workers,
                    node_rank=node_rank,
                    num_nodes=len(placement.workers),
                    world_size=world,
                    slice=name,
                    slice_id=slice_id,
                    num_slices=len(placement.slices),
                    group_id=rank // size,
                    num_groups=world // size,
                    group_rank=rank % size,
                    group_size=size,
                    slice_hosts=len(placement.slices[slice_id].hosts),
                )
            )
    if group_size is None or wanted <= world:
        return tuple(out)
    out += groups_nowhere(out, wanted // size)
    return tuple(
        msgspec.structs.replace(
            a,
            num_nodes=len({b.host for b in out}),
            world_size=wanted,
            num_slices=len({b.slice for b in out}),
            num_groups=wanted // size,
        )
        for a in out
    )


def groups_nowhere(placed: Sequence[Assignment], groups: int) -> list[Assignment]:
    """Those of so many groups that have no place, as if they had lost one like the others': in slices that
    don't exist, of the shape of those that do, so that they can move to any that comes.
    """
    present: dict[int, list[Assignment]] = {}
    for a in placed:
        present.setdefault(a.group_id, []).append(a)
    missing = [number for number in range(groups) if number not in present]
    model = min(_by_shared_slices(present), key=len)
    enough = range(len(placed) + len(missing) * placed[0].group_size)
    nodes = iter(sorted(set(enough) - {a.node_rank for a in placed}))
    slices = iter(sorted(set(enough) - {a.slice_id for a in placed}))
    node_ranks: dict[HostId, int] = {}
    slice_ids: dict[SliceName, int] = {}
    out: list[Assignment] = []
    for first in range(0, len(missing), len(model)):
        prefix = f"{_NOWHERE}{missing[first]}/"
        piece = [
            msgspec.structs.replace(
                a,
                rank=number * a.group_size + a.group_rank,
                group_id=number,
                host=prefix + a.host,
                slice=prefix + a.slice,
            )
            for number, members in zip(missing[first:], model, strict=False)
            for a in members
        ]
        for a in piece:
            if a.host not in node_ranks:
                node_ranks[a.host] = next(nodes)
            if a.slice not in slice_ids:
                slice_ids[a.slice] = next(slices)
            out.append(
                msgspec.structs.replace(
                    a,
                    local_world_size=sum(b.host == a.host for b in piece),
                    node_rank=node_ranks[a.host],
                    slice_id=slice_ids[a.slice],
                )
            )
    return out


def _by_shared_slices(groups: Mapping[int, list[Assignment]]) -> list[list[list[Assignment]]]:
    """Groups that have a slice in common come and go together. Their numbers follow each other."""
    found: list[list[list[Assignment]]] = []
    last: set[SliceName] = set()
    for _, members in sorted(groups.items()):
        mine = {a.slice for a in members}
        if mine & last:
            found[-1].append(members)
        else:
            found.append([members])
        last = mine
    return found


def move_slices(
    moving: Sequence[Assignment],
    whole: Sequence[Slice],
    spare: Sequence[Slice],
    leave: Collection[SliceName],
) -> tuple[Assignment, ...]:
    """The old places of ``moving``, with slices that aren't whole exchanged for spares of the same shape.

    Slices in ``leave`` are exchanged as well, if a spare fits. Empty when a slice that isn't whole finds no
    spare. Ranks, groups and slice ids stay.
    """
    standing = {s.name: s for s in whole}
    left = list(spare)
    must: list[list[Assignment]] = []
    """By slice, those in one that isn't whole."""
    may: list[list[Assignment]] = []
    for name in sorted({a.slice for a in moving}, key=natural_key):
        members = sorted((a for a in moving if a.slice == name), key=lambda a: a.rank)
        same = standing.get(name)
        if same is None:
            must.append(members)
        elif not {a.host for a in members} <= {h.id for h in same.hosts}:
            left.insert(0, same)  # whole again, with other machines
            must.append(members)
        elif name in leave:
            may.append(members)
    moved: dict[HostId, HostView] = {}
    for i, members in enumerate([*must, *may]):
        workers = Counter(a.host for a in members)
        shape = members[0].slice_hosts
        fitting = next((s for s in left if len(s.hosts) == shape and _fit(workers.values(), s.hosts)), None)
        if fitting is not None:
            left.remove(fitting)
            moved.update(zip(workers, fitting.hosts, strict=False))
        elif i < len(must):
            return ()
    return tuple(
        msgspec.structs.replace(a, host=moved[a.host].id, slice=moved[a.host].slice) if a.host in moved else a
        for a in moving
    )


def _fit(workers: Collection[int], hosts: Sequence[HostView]) -> bool:
    return len(workers) <= len(hosts) and all(
        host.slots >= n for host, n in zip(hosts, workers, strict=False)
    )
