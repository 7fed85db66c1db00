"""The modelled storage: which shards there should be, what is committed, and what was thrown away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep.control import commands as c, events as e
from everstep.control.reports import Part
from everstep.sim.brain.machines import GroupKey

if TYPE_CHECKING:
    from everstep.sim.brain.world import World


class Storage:
    def __init__(self, world: World) -> None:
        self._world = world
        self.committed: list[e.CheckpointRef] = []
        self.discarded: set[str] = set()
        self.damaged: set[str] = set()
        """Committed, and no longer what their manifests say."""
        self.known_damaged: set[str] = set()
        """Those that somebody has tried to restore."""
        self.gone: set[str] = set()
        """Those that retention let go of."""
        self.newest: Callable[[], str | None] = lambda: None
        """What the brain would restore now."""
        self.steps_of: dict[str, int] = {}
        """How far training was, by folder."""
        self.shards: dict[str, set[int]] = {}
        """The ranks that have something to add, by folder."""

    def expect(self, part: Part, rank: int, step: int) -> None:
        self.steps_of[part.folder] = step
        self.shards.setdefault(part.folder, set()).add(rank)

    def commit(self, command: c.CommitCheckpoint) -> None:
        world = self._world
        fails = world.chance(world.scenario.failed_commit)
        pause = world.between(0.01, 2.0)
        if world.rng.random() > 0.9:
            pause = world.between(2.0, 120.0 if world.chance(0.2) else 30.0)
        world.clock.after(pause, partial(self._written, command, fails, world.driver))

    def _written(self, command: c.CommitCheckpoint, fails: bool, driver: int) -> None:
        world = self._world
        folder, index = command.checkpoint.folder, command.checkpoint.index
        if driver != world.driver:
            return  # its driver died before the manifest was written
        if world.suspended:
            world.clock.after(1.0, partial(self._written, command, fails, driver))
            return
        if fails or folder in self.discarded:
            world.tell(e.CommitFailed(at=world.clock.now, folder=folder, reason="503"))
            return
        ref = e.CheckpointRef(
            folder, command.epoch, index, command.group, command.generation, command.order, True
        )
        self.committed.append(ref)
        world.clock.after(world.between(0.001, 1.0), partial(self._acknowledge, folder, driver))
        world.tell(e.CheckpointCommitted(at=world.clock.now, folder=folder, state=True))
        self._retain()

    def _retain(self) -> None:
        """The user keeps so many; the newest is always one of them."""
        kept = self.restorable()
        most = self._world.scenario.keep
        if most is None or len(kept) <= most:
            return
        oldest = next(ref.folder for ref in kept if ref.folder != self.newest())
        self.gone.add(oldest)
        self._world.tell(e.CheckpointGone(at=self._world.clock.now, folder=oldest))

    def restorable(self) -> list[e.CheckpointRef]:
        """Committed, not let go, and not known to be damaged; in the order in which they were committed."""
        out = self.gone | self.known_damaged
        return [ref for ref in self.committed if ref.folder not in out]

    def let_go(self) -> list[e.CheckpointRef]:
        """The newest of the others, of each incarnation of a group."""
        out = self.gone | self.known_damaged
        newest: dict[GroupKey, e.CheckpointRef] = {}
        for ref in self.committed:
            key = (ref.epoch, ref.group, ref.generation)
            if ref.folder in out and (key not in newest or newest[key].index < ref.index):
                newest[key] = ref
        return list(newest.values())

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
