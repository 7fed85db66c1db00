"""Reads the cluster's state, again and again: which hosts there are for this run, and what it still wants."""

from __future__ import annotations

import random
import time
from typing import Protocol

from everstep.engine.base import EngineRequest, Sink
from everstep.engine.ray.demand import Demand
from everstep.engine.ray.held import HeldSlices
from everstep.engine.ray.link import ActorLink
from everstep.engine.ray.upkeep import OffLoop
from everstep.engine.ray.watch import ClusterWatch, read_cluster
from everstep.protocol import wire
from everstep.topology.slices import HostView

POLL_S = 0.25
_POLL_SHARE = 0.2
"""Of the time, at most: reading a large cluster, or on a busy machine, takes longer and is done
less often.
"""


class CapacityOwner(Protocol):
    """What ``Capacity`` needs of the engine."""

    request: EngineRequest
    sink: Sink
    watch: ClusterWatch
    demand: Demand
    off_loop: OffLoop

    def lost(self, link: ActorLink, why: str) -> None: ...


class Capacity:
    def __init__(self, engine: CapacityOwner, slices: HeldSlices, tag: str) -> None:
        self._engine = engine
        self._slices = slices
        self._tag = tag
        self.wanted_workers = 0
        """As many as the run could use; 0: it asks for none."""
        self._last_view: tuple[HostView, ...] = ()
        self._took = 0.0

    async def update(self) -> None:
        began = time.monotonic()
        state = await self._engine.off_loop(read_cluster, self._tag)
        self._took = time.monotonic() - began
        self._engine.watch.take(state, self._slices.hosts())
        notices = self._engine.watch.new_notices(
            state, self._slices.hosts(), self._engine.request.deadlines.notice_s
        )
        for host, grace in notices.items():
            self._engine.sink.on_message(host, wire.Noticed(grace))
        for link in self._slices.links():
            if not self._engine.watch.is_alive(link.host):
                self._engine.lost(link, "its node is dead, says Ray")
        self.publish()
        short = max(0, self.wanted_workers - self._engine.watch.room()) if self.wanted_workers else 0
        await self._engine.off_loop(
            self._engine.demand.update, short, state.nodes, self._engine.watch.arriving(), state.groups
        )

    def pause(self) -> float:
        """At random: two runs that want the same slices must not try at the same times for ever."""
        return max(POLL_S, self._took / _POLL_SHARE) * random.uniform(0.7, 1.3)

    def publish(self) -> None:
        view = tuple(self._slices.as_reserved(view) for view in self._engine.watch.hosts.values())
        if view != self._last_view:
            self._last_view = view
            self._engine.sink.on_capacity(view)

    def forget_view(self) -> None:
        """Publish the next view, whether or not it has changed."""
        self._last_view = ()
