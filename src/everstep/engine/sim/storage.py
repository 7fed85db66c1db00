"""The modelled storage: which shards there should be, what is committed, and what was thrown away."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from everstep.control import commands as c, events as e
from everstep.control.reports import Part

if TYPE_CHECKING:
    from everstep.engine.sim.world import World


class Storage:
    def __init__(self, world: World) -> None:
        self._world = world
        self.committed: list[e.CheckpointRef] = []
        self.discarded: set[str] = set()
        self.steps_of: dict[str, int] = {}
        """How far training was, by folder."""
        self.shards: dict[str, set[int]] = {}
        """The ranks that have something to add, by folder."""

    def expect(self, part: Part, rank: int, step: int) -> None:
        self.steps_of[part.folder] = step
        self.shards.setdefault(part.folder, set()).add(rank)

    def commit(self, command: c.CommitCheckpoint) -> None:
        world = self._world
        quick = world.rng.random() < 0.9
        fails = world.chance(world.scenario.failed_commit)
        pause = world.between(0.01, 2.0) if quick else world.between(2.0, 30.0)
        world.clock.after(pause, partial(self._written, command, fails, world.driver))

    def _written(self, command: c.CommitCheckpoint, fails: bool, driver: int) -> None:
        world = self._world
        folder, index = command.checkpoint.folder, command.checkpoint.index
        if driver != world.driver:
            return  # its driver died before the manifest was written
        if fails or folder in self.discarded:
            world.tell(e.CommitFailed(at=world.clock.now, folder=folder, reason="503"))
            return
        ref = e.CheckpointRef(folder, command.epoch, index, command.group, command.generation)
        self.committed.append(ref)
        world.clock.after(world.between(0.001, 1.0), partial(self._acknowledge, folder, driver))
        world.tell(e.CheckpointCommitted(at=world.clock.now, folder=folder))

    def discard(self, command: c.DiscardCheckpoint) -> None:
        world = self._world
        self.discarded.add(command.folder)
        word = partial(self._acknowledge, command.folder, world.driver)
        world.clock.after(world.between(0.001, 1.0), word)

    def _acknowledge(self, folder: str, driver: int) -> None:
        """Agents are told what became of a checkpoint, unless the driver dies first."""
        if driver != self._world.driver:
            return
        for host in self._world.hosts.values():
            for worker in host.workers:
                kept = {k: part for k, part in worker.unacknowledged.items() if part.folder != folder}
                worker.unacknowledged = kept
