"""The hosts that there are, and what the run holds of them: reservations, prepared hosts, notices.

Capacity is always looked at afresh: a slice counts if it is whole and free now, and what we hold ourselves
is free for us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from everstep.control import commands as c
from everstep.control.budgets import Suspects
from everstep.control.events import Notice, TimerName
from everstep.control.settings import Settings
from everstep.topology.placement import Assignment, Placement, move_slices, plan
from everstep.topology.slices import HostId, HostView, Slice, SliceName, describe_shortage, whole_slices


class Fleet:
    """What it decides to take or to give back goes out as commands."""

    def __init__(
        self,
        settings: Settings,
        do: Callable[[c.AnyCommand], None],
        given_back: Callable[[HostId], None],
    ) -> None:
        """``given_back``: nothing of ours is left on this host."""
        self.settings = settings
        self._given_back = given_back
        self.hosts: dict[HostId, HostView] = {}
        self.held: set[SliceName] = set()
        self.broken: set[SliceName] = set()
        """Held slices that have lost a host: they are given back, and may be reserved again once they are
        whole.
        """
        self.prepared: set[HostId] = set()
        self.preparing: set[HostId] = set()
        self.noticed: dict[SliceName, float] = {}
        """Slices that will be taken away, and when."""
        self._noticed_hosts: dict[SliceName, frozenset[HostId]] = {}
        self.margins: dict[SliceName, float] = {}
        self.suspects = Suspects(settings.deadlines)
        self.asked_for: dict[int, frozenset[SliceName]] = {}
        self._whole: list[Slice] | None = None
        self._do = do

    # ------------------------------------------------------------------ what there is

    def alive(self, host: HostId) -> bool:
        view = self.hosts.get(host)
        return view is not None and view.alive

    def learn(self, hosts: Iterable[HostView]) -> list[HostView]:
        """The engine's present view. Returns the hosts of ours that are not there any more."""
        before, self.hosts = self.hosts, {host.id: host for host in hosts}
        self._whole = None
        self._forget_notices(self.noticed.keys() - self.held)
        return [
            host
            for host in before.values()
            if host.alive and host.slice in self.held and not self.alive(host.id)
        ]

    def lose(self, host: HostId) -> HostView | None:
        """The host is gone. Returns it, unless that was known."""
        view = self.hosts.get(host)
        if view is None or not view.alive:
            return None
        self.hosts[host] = msgspec.structs.replace(view, alive=False)
        self._whole = None
        return view

    def notice(self, notice: Notice) -> None:
        self.noticed[notice.slice] = notice.deadline
        self._noticed_hosts[notice.slice] = frozenset(notice.hosts)

    def margin(self, name: SliceName) -> float:
        """How long before its deadline a slice is left: of a short notice, a part."""
        return self.margins.get(name, self.settings.migrate_margin_s)

    def machines(self, name: SliceName) -> tuple[HostId, ...]:
        """Those that are in this slice now."""
        return tuple(sorted(host.id for host in self.hosts.values() if host.slice == name))

    def deadline_of(self, host: HostId) -> float | None:
        """Until when this machine stays, if it has a notice."""
        name = self.hosts[host].slice
        return self.noticed.get(name) if host in self._noticed_hosts.get(name, ()) else None

    def _forget_notices(self, names: Iterable[SliceName]) -> None:
        """A notice goes with its machines: others that come in their place have none."""
        for name in list(names):
            if name in self.noticed and not any(map(self.alive, self._noticed_hosts[name])):
                del self.noticed[name]

    def forget(self, host: HostId) -> None:
        """Nothing of ours is on this host any more."""
        self.prepared.discard(host)
        self.preparing.discard(host)

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
                prefer=self.held.union(*self.asked_for.values()),
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
        doomed = {name for name, deadline in self.noticed.items() if at >= deadline - self.margin(name)}
        whole = [s for s in self._usable() if s.name not in doomed - shared]
        spare = [
            s for s in whole if s.name not in mine and s.name not in taken and s.name not in self.noticed
        ]
        spare.sort(key=lambda s: (s.name in aside, s.name not in self.held))
        # A slice that others train in is not left, or two slices would be used in part.
        leave = (self.noticed.keys() | (aside if any(s.name not in aside for s in spare) else set())) - shared
        return move_slices(moving, whole, spare, leave)

    def _set_aside(self, at: float) -> frozenset[SliceName]:
        return frozenset(self.hosts[h].slice for h in self.suspects.set_aside(at) if h in self.hosts)

    # ------------------------------------------------------------------ taking and giving back

    def reserve(self, reservation: int, slices: Iterable[SliceName], at: float) -> None:
        wanted = frozenset(slices)
        assert not wanted & self.held, "what is held is not reserved again"
        self.asked_for[reservation] = wanted
        self._do(c.Reserve(reservation, tuple(sorted(wanted))))
        self._do(c.SetTimer(TimerName.RESERVE, reservation, at + self.settings.deadlines.reserve_s))

    def granted(self, reservation: int) -> bool:
        """False: we gave up on it, and its release is on its way."""
        slices = self.asked_for.pop(reservation, None)
        if slices is None:
            return False
        self._do(c.CancelTimer(TimerName.RESERVE, reservation))
        self.held |= slices
        return True

    def refused(self, reservation: int) -> bool:
        if self.asked_for.pop(reservation, None) is None:
            return False
        self._do(c.CancelTimer(TimerName.RESERVE, reservation))
        return True

    def withdraw(self, reservation: int | None) -> None:
        """Give up on a reservation that has not been answered."""
        slices = self.asked_for.pop(reservation, None) if reservation is not None else None
        if slices is not None and reservation is not None:
            self._do(c.CancelTimer(TimerName.RESERVE, reservation))
            self._do(c.Release(tuple(sorted(slices))))

    def asks_for(self, reservation: int | None) -> frozenset[SliceName]:
        return self.asked_for.get(reservation, frozenset()) if reservation is not None else frozenset()

    def prepare(self, hosts: Iterable[HostId]) -> bool:
        """Whether one of them had to be told to."""
        told = False
        for host in sorted(set(hosts) - self.prepared - self.preparing):
            if self.alive(host) and self.hosts[host].slice in self.held:
                self.preparing.add(host)
                self._do(c.PrepareHost(host))
                told = True
        return told

    def release(self, slices: Collection[SliceName]) -> None:
        names = tuple(sorted(self.held & set(slices)))
        if not names:
            return
        self.held -= set(names)
        self.broken -= set(names)
        self._forget_notices(names)
        for host in self.hosts.values():
            if host.slice in names:
                self.forget(host.id)
                self._given_back(host.id)
        self._do(c.Release(names))
