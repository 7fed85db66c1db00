"""Reservations on this machine: hosts that are claimed, and the machine's own, which is started for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.engine.local.own_host import OwnHost
from everstep.errors import EverstepError
from everstep.protocol import wire
from everstep.topology.slices import HostId, SliceName

if TYPE_CHECKING:
    from everstep.engine.local.engine import LocalEngine


class LocalReservations:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._claiming: dict[int, set[HostId]] = {}
        """Hosts of reservations that are under way."""

    def check(self) -> None:
        """Hosts may have been claimed, or lost."""
        for reservation, hosts in list(self._claiming.items()):
            self._check(reservation, hosts)

    def reserve(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        own = self._engine.own
        if own is not None and own.slice in slices and own.starting:
            self._claiming[reservation] = {own.host}  # an earlier reservation has it started
            return
        if own is not None and own.is_vacant(slices):
            self._claiming[reservation] = {own.host}
            own.begin()
            self._engine.spawn(self._start_own(own))
            return
        hosts = {link.host for link in self._engine.links.values() if link.facts.slice in slices}
        for host in hosts:
            left_behind = self._engine.links[host].is_left_behind
            self._engine.claim(host)
            if left_behind:
                self._engine.retire(host)  # nobody counts on its workers now: they end before it is used
        self._claiming[reservation] = hosts
        self._check(reservation, hosts)

    async def _start_own(self, own: OwnHost) -> None:
        host = own.host
        # Messages from earlier agents don't count from now on, also if one comes to life again: they are
        # ended.
        for link in list(self._engine.links.values()):
            self._engine.heartbeats.forget(link.host)
            self._engine.dead[link.host] = self._engine.links.pop(link.host)
            link.alive = link.retiring = False
            link.close()
        try:
            await own.start()
            await self._engine.find_hosts()
        except (EverstepError, OSError) as error:
            own.started(failed=True)
            for reservation in [r for r, hosts in self._claiming.items() if host in hosts]:
                del self._claiming[reservation]
                self._engine.sink.on_reservation_failed(reservation, str(error))
        else:
            own.started(failed=False)
            if any(host in hosts for hosts in self._claiming.values()):
                self._engine.claim(host)
        self._engine.status_changed()

    def _check(self, reservation: int, hosts: set[HostId]) -> None:
        if self._engine.own is not None and self._engine.own.starting in hosts:
            return
        links = [self._engine.links[host] for host in hosts if host in self._engine.links]
        taken = sorted(link.host for link in links if link.run not in ("", self._engine.request.holder))
        missing = sorted(hosts - {link.host for link in links if link.alive})
        if taken or missing or not hosts:
            del self._claiming[reservation]
            for link in links:
                link.send(wire.Unclaim(self._engine.request.lease))
            why = f"{', '.join(taken)} in use by others" if taken else f"{', '.join(missing) or 'hosts'} gone"
            self._engine.sink.on_reservation_failed(reservation, why)
        elif all(link.run == self._engine.request.holder for link in links):
            del self._claiming[reservation]
            self._engine.sink.on_reserved(reservation)

    def release(self, slices: tuple[SliceName, ...]) -> None:
        if self._engine.own is not None and self._engine.own.slice in slices:
            for hosts in self._claiming.values():
                hosts.discard(self._engine.own.host)
        for link in self._engine.links.values():
            if link.facts.slice in slices:
                for hosts in self._claiming.values():
                    hosts.discard(link.host)
                link.send(wire.Unclaim(self._engine.request.lease))
        self._claiming = {r: hosts for r, hosts in self._claiming.items() if hosts}
