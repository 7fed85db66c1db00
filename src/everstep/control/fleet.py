"""The hosts that there are, and what the run has of them: reservations, prepared hosts, notices.

Capacity is computed anew each time: a slice counts if it is whole and free now, and what we hold ourselves
is free for us.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from everstep.control.events import Notice, PreemptionNotice, TimerName
from everstep.control.settings import Settings
from everstep.health.hosts import Suspects
from everstep.topology.placement import Assignment, Placement, move_slices, plan
from everstep.topology.slices import (
    HostId,
    HostView,
    Slice,
    SliceName,
    describe_shortage,
    natural_key,
    whole_slices,
)


@dataclass
class SliceReservation:
    """Slices that have been asked for: for a restart, or while training goes on, for workers that will move
    there.
    """

    key: int
    slices: frozenset[SliceName]
    hosts: frozenset[HostId]
    due: dict[TimerName, float]


@dataclass
class NoticedSlice:
    """A slice that will be taken away."""

    deadline: float
    hosts: frozenset[HostId]
    """The machines that will go: those that replace them have no notice."""
    leave_at: float
    last_save: float
    """From then on a last checkpoint is wanted: once it is committed, the workers leave."""
    confirmed: bool
    """Its machines have sent it to this driver; else it is only what an earlier driver has written down."""
    saved: float | None = None
    """When a checkpoint was last committed that was asked for because of it."""


class Fleet:
    """The cluster as the engine's last list has it, and the run's share of it: slices that are ``asked_for``,
    then ``held``, whose hosts are ``preparing``, then ``prepared``. ``broken`` are held slices that have
    lost a host, ``noticed`` those that will be taken away.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hosts: dict[HostId, HostView] = {}
        self.held: set[SliceName] = set()
        self.broken: set[SliceName] = set()
        """Held slices that have lost a host: they are given back, and may be reserved again once they are
        whole.
        """
        self.prepared: set[HostId] = set()
        self.preparing: set[HostId] = set()
        self.noticed: dict[SliceName, NoticedSlice] = {}
        self.unlisted: dict[HostId, PreemptionNotice] = {}
        """Of machines that the engine has not listed yet."""
        self.suspects = Suspects(settings.deadlines)
        self.asked_for: dict[int, SliceReservation] = {}
        self._whole: list[Slice] | None = None

    # ------------------------------------------------------------------ what there is

    def alive(self, host: HostId) -> bool:
        view = self.hosts.get(host)
        return view is not None and view.alive

    def learn(self, hosts: Iterable[HostView]) -> list[HostView]:
        """Take in the engine's present list. Returns the hosts of ours that are no longer in it, or dead."""
        before, self.hosts = self.hosts, {host.id: host for host in hosts}
        self._whole = None
        self._forget_notices(self.noticed.keys() - self.held)
        ours = (host for host in before.values() if host.alive and host.slice in self.held)
        return [host for host in ours if not self.alive(host.id)]

    def mark_dead(self, host: HostId) -> HostView | None:
        """The host is gone. Returns it, or None if that was known."""
        view = self.hosts.get(host)
        if view is None or not view.alive:
            return None
        self.hosts[host] = msgspec.structs.replace(view, alive=False)
        self._whole = None
        return view

    def hosts_held(self) -> list[HostView]:
        """The hosts that are there and belong to the run now, those that will be taken away last."""
        held = (host for host in self.hosts.values() if host.alive and host.slice in self.held)
        return sorted(held, key=lambda host: (host.slice in self.noticed, natural_key(host.id)))

    def notice(self, notice: Notice, margin: float, confirmed: bool) -> None:
        until, hosts = notice.deadline, frozenset(notice.hosts)
        self.noticed[notice.slice] = NoticedSlice(until, hosts, until - margin, until - 2 * margin, confirmed)

    def machines(self, name: SliceName) -> tuple[HostId, ...]:
        """Those that are in this slice now."""
        return tuple(sorted(host.id for host in self.hosts.values() if host.slice == name))

    def _forget_notices(self, names: Iterable[SliceName]) -> None:
        """A notice goes with its machines."""
        for name in list(names):
            if name in self.noticed and not any(map(self.alive, self.noticed[name].hosts)):
                del self.noticed[name]

    def forget(self, host: HostId) -> None:
        """Nothing of ours is on this host any more."""
        self.prepared.discard(host)
        self.preparing.discard(host)

    def give_back(self, names: Collection[SliceName]) -> list[HostId]:
        """These slices are not held any more. Returns their hosts."""
        self.held -= set(names)
        self.broken -= set(names)
        self._forget_notices(names)
        hosts = [host.id for host in self.hosts.values() if host.slice in names]
        for host in hosts:
            self.forget(host)
        return hosts

    def is_whole(self, names: Collection[SliceName]) -> bool:
        return not names or set(names) <= {s.name for s in self._whole_slices()}

    def _whole_slices(self) -> list[Slice]:
        """Worked out once for each view of the cluster."""
        if self._whole is None:
            self._whole = whole_slices(self.hosts.values())
        return self._whole

    def _usable(self) -> list[Slice]:
        return [s for s in self._whole_slices() if s.name not in self.broken]

    def shortage(self, besides: Collection[SliceName] = ()) -> str:
        return describe_shortage(self.hosts.values(), besides)

    # ------------------------------------------------------------------ where workers could go

    def place_all(self, at: float, *, staying_only: bool = False) -> Placement | None:
        """Where all workers go.

        Slices that are about to be taken away are used only if there is no other way.
        """
        everything = self._usable()
        staying = [s for s in everything if s.name not in self.noticed]
        for slices in (staying,) if staying_only or not self.noticed else (staying, everything):
            found = plan(
                slices,
                at_least=self.settings.start_min,
                at_most=self.settings.workers_max,
                multiple_of=self.settings.group_size or 1,
                prefer=self.held.union(*(r.slices for r in self.asked_for.values())),
                avoid=self._set_aside(at),
                spread=self.settings.spread,
            )
            if found is not None:
                return found
        return None

    def place_again(
        self,
        moving: Sequence[Assignment],
        everyone: Sequence[Assignment],
        taken: Collection[SliceName],
        at: float,
    ) -> tuple[Assignment, ...]:
        """Where these workers go while the others stay: to their old slices, or to others of the same
        shape. A slice that is about to be taken away isn't worth a start.
        """
        aside = self._set_aside(at)
        mine = {a.slice for a in moving}
        shared = {a.slice for a in everyone} & set(taken)
        doomed = {name for name, noticed in self.noticed.items() if at >= noticed.leave_at}
        whole = [s for s in self._usable() if s.name not in doomed - shared]
        used = mine.union(taken, self.noticed)
        spare = [s for s in whole if s.name not in used]
        spare.sort(key=lambda s: (s.name in aside, s.name not in self.held))
        # A slice that others train in is not left, or two slices would be used in part.
        leave = (self.noticed.keys() | (aside if any(s.name not in aside for s in spare) else set())) - shared
        return move_slices(moving, whole, spare, leave)

    def _set_aside(self, at: float) -> frozenset[SliceName]:
        return frozenset(self.hosts[h].slice for h in self.suspects.set_aside(at) if h in self.hosts)
