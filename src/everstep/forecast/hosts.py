"""The hosts of the modelled cluster: which there are, what an outage does to them and to the workers there,
and when the controller learns of it.

What happens when is decided before, in ``outages``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

import msgspec

from everstep.control import events as e
from everstep.failures import Failure, Kind
from everstep.forecast.checkpoints import CrewCheckpoints
from everstep.forecast.crews import Crew, Crews
from everstep.forecast.figures import Figures
from everstep.forecast.outages import Outage, lone_host
from everstep.forecast.question import Policy
from everstep.goodput import Category
from everstep.sim.time import VirtualTime
from everstep.topology.slices import HostId, HostView

_TOGETHER_S = 1.0
"""Hosts that come back within this time are announced together."""


class ModelledHosts:
    def __init__(
        self,
        views: Iterable[HostView],
        policy: Policy,
        crews: Crews,
        checkpoints: CrewCheckpoints,
        figures: Figures,
        clock: VirtualTime,
        emit: Callable[[e.Event], None],
    ) -> None:
        self._views = {view.id: view for view in views}
        self._policy = policy
        self._crews = crews
        self._checkpoints = checkpoints
        self._figures = figures
        self._clock = clock
        self._emit = emit
        self._announcing = False
        """Whether hosts that came back are about to be announced."""

    def alive(self, host: HostId) -> bool:
        return self._views[host].alive

    def emit_capacity(self) -> None:
        self._emit(e.CapacityChanged(at=self._clock.now, hosts=tuple(self._views.values())))

    def strike(self, outage: Outage) -> None:
        match outage.kind:
            case "crash":
                self._crash(outage.host)
            case "lost":
                self._lose(outage.host)
            case "back":
                self._return(outage.host)
            case "notice":
                self._give_notice(outage.host, outage.deadline)
            case _:
                assert_never(outage.kind)

    def _crash(self, host: HostId) -> None:
        """A worker dies, if one trains there."""
        crew = self._crews.on(host)
        if crew is None or crew.stretch is None:
            return
        self._figures.worker_failures += 1
        self._stall(crew, host_lost=False)
        rank = self._crews.places.rank_on(host)
        epoch, _, generation = self._crews.places.incarnation(crew.group)
        failure = Failure(Kind.EXCEPTION, self._clock.now, "a worker died", rank=rank, host=host)
        seen = self._clock.now + self._policy.phases.detect_s
        event = e.WorkerFailed(at=seen, epoch=epoch, generation=generation, rank=rank, failure=failure)
        self._clock.at(seen, partial(self._emit, event))

    def _lose(self, host: HostId) -> None:
        view = self._views[host]
        if not view.alive:
            return
        self._views[host] = msgspec.structs.replace(view, alive=False)
        crew = self._crews.on(host)
        if crew is not None:
            self._figures.host_failures += 1
            self._stall(crew, host_lost=True)
        self._crews.host_lost(host)
        failure = Failure(Kind.HOST_LOST, self._clock.now, "the host is gone", host=host)
        seen = self._clock.now + self._policy.phases.detect_host_s
        self._clock.at(seen, partial(self._emit, e.HostLost(at=seen, host=host, failure=failure)))

    def _stall(self, crew: Crew, host_lost: bool) -> None:
        """It stops, if it trains or restores."""
        if crew.stretch is not None:
            self._figures.interrupted(self._clock.now)
            # Before it is cut off: what it had saved by now counts.
            self._checkpoints.report(crew)
        if crew.stretch is not None or crew.category is Category.RESTORE:
            self._crews.stall(crew, self._clock.now, host_lost)

    def _return(self, host: HostId) -> None:
        view = self._views.get(host) or lone_host(host)
        self._views[host] = msgspec.structs.replace(view, alive=True)
        if not self._announcing:
            self._announcing = True
            self._clock.after(max(_TOGETHER_S, self._policy.phases.detect_host_s), self._announce)

    def _announce(self) -> None:
        self._announcing = False
        self.emit_capacity()

    def _give_notice(self, host: HostId, deadline: float) -> None:
        if self._policy.heeds_notices:
            self._emit(e.PreemptionNotice(at=self._clock.now, host=host, deadline=deadline))
