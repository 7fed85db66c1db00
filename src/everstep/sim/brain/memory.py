"""Snapshots in the modelled world: each rank has two slots in its host's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from everstep.control import commands as c
from everstep.control.snapshots import At, Copy
from everstep.sim.brain.machines import Host, Life, ModelWorker
from everstep.sim.brain.violation import Violation
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId

if TYPE_CHECKING:
    from everstep.sim.brain.world import World

SLOTS = 2


class ModelCopy(NamedTuple):
    """What is in a slot: whole, or it isn't there."""

    at: At
    step: int
    ranks: int
    """How many it was divided among."""


class ModelMemory:
    def __init__(self, world: World) -> None:
        self._world = world
        self._slots: dict[tuple[HostId, int], list[ModelCopy | None]] = {}

    def begin(self, host: Host, worker: ModelWorker) -> int:
        """The worker writes over a slot that it may. Returns which; it holds nothing until it is finished."""
        slots = self._slots.setdefault((host.id, worker.rank), [None] * SLOTS)
        number = next(i for i, held in enumerate(slots) if held is None or held.at != worker.kept)
        slots[number] = None
        return number

    def finish(self, host: Host, worker: ModelWorker, number: int, at: At, step: int) -> None:
        self._slots[host.id, worker.rank][number] = ModelCopy(at, step, worker.place.world_size)
        worker.open = at

    def forget(self, host: Host) -> None:
        """Its agent is gone, or has let go of the run."""
        for key in [key for key in self._slots if key[0] == host.id]:
            del self._slots[key]

    def find(self, host: HostId, rank: int, at: At) -> ModelCopy | None:
        slots = self._slots.get((host, rank), [])
        return next((held for held in slots if held is not None and held.at == at), None)

    def copies(self, place: Assignment) -> list[Copy]:
        slots = self._slots.get((place.host, place.rank), [])
        return [Copy(place.rank, place.host, *held.at, held.ranks) for held in slots if held is not None]

    def newest_whole(self, places: tuple[Assignment, ...]) -> At | None:
        """The newest that all of these have where they are."""
        found = []
        for place in places:
            slots = self._slots.get((place.host, place.rank), [])
            found.append({held.at for held in slots if held is not None and held.ranks == len(places)})
        return max(set.intersection(*found), default=None)

    def restore(self, host: Host, worker: ModelWorker, at: At) -> None:
        """As a worker does when it starts."""
        held = self.find(host.id, worker.rank, at)
        if held is None:
            raise Violation(
                f"11: rank {worker.rank} is to restore {at} from {host.id}, which doesn't have it"
            )
        for _, peer in self._world.processes.members(worker.key):
            if peer is not worker and peer.restored is not None and peer.restored != held:
                raise Violation(
                    f"12: rank {worker.rank} restores step {held.step}, and rank {peer.rank} another: "
                    f"{peer.restored}"
                )
        worker.restored = held
        worker.step, worker.kept = held.step, at

    def keep(self, command: c.KeepSnapshot) -> None:
        for host in self._world.hosts.values():
            for worker in host.workers:
                if worker.epoch == command.epoch and worker.rank in command.ranks:
                    self._world.to_host(host, partial(self._told, worker, command))

    def _told(self, worker: ModelWorker, command: c.KeepSnapshot) -> None:
        if worker.life is Life.DEAD:
            return
        worker.kept = command.kept
        if worker.open is not None and worker.open <= command.upto:
            worker.open = None
