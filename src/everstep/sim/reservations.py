"""Reservations of a simulated driver: granted, refused, slow, too late, or in part."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from everstep.topology.slices import SliceName

if TYPE_CHECKING:
    from everstep.sim.cluster import Cluster, SimSlice
    from everstep.sim.engine import SimEngine


class SimReservations:
    def __init__(self, engine: SimEngine, cluster: Cluster) -> None:
        self._engine = engine
        self._cluster = cluster
        self._waiting: dict[int, tuple[SliceName, ...]] = {}

    def request(self, reservation: int, slices: tuple[SliceName, ...]) -> None:
        cluster = self._cluster
        self._waiting[reservation] = slices
        delay, limit = cluster.rng.uniform(0.01, 2.0), cluster.scenario.deadlines.reserve_s
        if cluster.chance(cluster.scenario.slow_reservation):
            delay = cluster.rng.uniform(1.0, 2.0 * limit)
            if delay > 0.9 * limit:
                cluster.fault()
        self._engine.process.later(delay, partial(self._answer, reservation))

    def withdraw(self, slices: tuple[SliceName, ...]) -> None:
        self._waiting = {r: names for r, names in self._waiting.items() if not {*names} & {*slices}}

    def _answer(self, reservation: int, *, has_waited: bool = False) -> None:
        """All or none: what is granted in part is given back, and then refused."""
        cluster, sink = self._cluster, self._engine.sink
        names = self._waiting.get(reservation)
        if names is None or sink is None:
            return  # it was withdrawn
        slices = [cluster.slices[name] for name in names]
        left_behind = [agent for s in slices for agent in s.hosts if self._engine.left_behind(agent)]
        for agent in left_behind:  # nobody counts on its workers now: they end before it is used
            self._engine.claim(agent.host)
            self._engine.retire(agent.host)
        if left_behind:
            self._refuse(reservation, [])
            return
        if any(agent.emptying for s in slices for agent in s.hosts):  # nobody can have it yet
            if not has_waited:
                cluster.fault()
            self._engine.process.later(0.5, partial(self._answer, reservation, has_waited=True))
            return
        refused = cluster.chance(cluster.scenario.refused_reservation)
        if len(slices) > 1 and cluster.chance(cluster.scenario.partial_reservation):
            cluster.fault()
            for slice_ in slices[:-1]:
                self._claim_all(slice_)
            pause = cluster.rng.uniform(0.1, 3.0)
            self._engine.process.later(pause, partial(self._refuse, reservation, slices[:-1]))
        elif not refused and all(s.is_whole(self._engine.lists) and not s.other for s in slices):
            del self._waiting[reservation]
            for slice_ in slices:
                self._claim_all(slice_)
            sink.on_reserved(reservation)
        else:
            self._refuse(reservation, [])

    def _claim_all(self, slice_: SimSlice) -> None:
        if slice_.is_whole(self._engine.lists) and not slice_.other:
            for agent in slice_.hosts:
                self._engine.claim(agent.host)

    def _refuse(self, reservation: int, granted: list[SimSlice]) -> None:
        sink = self._engine.sink
        if self._waiting.pop(reservation, None) is None or sink is None:
            return
        self._cluster.fault()
        for slice_ in granted:
            for agent in slice_.hosts:
                self._engine.unclaim(agent.host)
        sink.on_reservation_failed(reservation, "not free")
