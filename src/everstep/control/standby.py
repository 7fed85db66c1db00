"""Slices taken while training goes on, for workers that will move there."""

from __future__ import annotations

from collections.abc import Callable, Collection

from everstep.control import commands as c
from everstep.control.events import TimerName
from everstep.control.fleet import Fleet
from everstep.control.settings import Settings
from everstep.topology.slices import HostId, SliceName


class _Standby:
    def __init__(self, slices: frozenset[SliceName], hosts: frozenset[HostId]) -> None:
        self.slices = slices
        self.hosts = hosts
        self.reserved = False


class Standbys:
    """By reservation. Notices that follow each other may need several."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        do: Callable[[c.AnyCommand], None],
        next_key: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._do = do
        self._next_key = next_key
        self._all: dict[int, _Standby] = {}

    def __contains__(self, reservation: int) -> bool:
        return reservation in self._all

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def slices(self) -> frozenset[SliceName]:
        """Taken, or asked for."""
        return frozenset(name for standby in self._all.values() for name in standby.slices)

    def on(self, host: HostId) -> list[int]:
        return [number for number, standby in self._all.items() if host in standby.hosts]

    def take(self, wanted: frozenset[SliceName], at: float) -> None:
        hosts = frozenset(h.id for h in self._fleet.hosts.values() if h.slice in wanted and h.alive)
        reservation = self._next_key()
        self._all[reservation] = _Standby(wanted, hosts)
        self._fleet.reserve(reservation, wanted, at)

    def granted(self, reservation: int, at: float) -> bool:
        """False: we gave up on it, and its release is on its way."""
        standby = self._all[reservation]
        if not self._fleet.granted(reservation):
            return False
        standby.reserved = True
        self._fleet.prepare(standby.hosts)
        limit = at + self._settings.deadlines.prepare_s
        self._do(c.SetTimer(TimerName.PREPARE, reservation, limit))
        return True

    @property
    def ready(self) -> bool:
        """Nothing of them is missing any more."""
        return all(s.reserved and s.hosts <= self._fleet.prepared for s in self._all.values())

    def stop_waiting(self) -> None:
        for reservation in self._all:
            self._do(c.CancelTimer(TimerName.PREPARE, reservation))

    def give_back(self, reservations: Collection[int] | None = None) -> None:
        """These, or all of them."""
        for reservation in list(self._all if reservations is None else reservations):
            standby = self._all.pop(reservation)
            self._forget(reservation)
            self._fleet.release(standby.slices)

    def hand_over(self) -> None:
        """Workers restart: what was taken can be part of that; what was only asked for is not waited for."""
        for reservation in self._all:
            self._forget(reservation)
        self._all.clear()

    def _forget(self, reservation: int) -> None:
        self._fleet.withdraw(reservation)
        self._do(c.CancelTimer(TimerName.PREPARE, reservation))
