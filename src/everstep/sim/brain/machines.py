"""What the modelled world consists of: slices, hosts, and the processes on them. Only what they are, not
what happens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from everstep.control import events as e
from everstep.control.failures import Failure
from everstep.control.reports import Part
from everstep.control.snapshots import At
from everstep.sim.brain.clock import EventClock, ModelChannel
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostId, SliceName

GroupKey = tuple[int, int, int]
"""(epoch, group, generation)."""


class Life(enum.StrEnum):
    SPAWNING = "spawning"
    JOINING = "joining"
    TRAINING = "training"
    RETURNED = "returned"
    DEAD = "dead"


class ModelWorker:
    """A process with a rank. It reports once a step; the group's tick moves it."""

    def __init__(
        self, place: Assignment, epoch: int, generation: int, step: int, damaged: str | None = None
    ) -> None:
        self.damaged = damaged
        """What it is to restore, and can't."""
        self.place = place
        self.epoch = epoch
        self.generation = generation
        self.life = Life.SPAWNING
        self.step = step
        self.reports = 0
        self.owed: set[int] = set()
        self.unacknowledged: dict[int, Part] = {}
        """Parts of whose commit or end it has not been told."""
        self.spoilt: set[int] = set()
        self.kept: At | None = None
        """The snapshot that it may not write over."""
        self.open: At | None = None
        """The one that it has taken, and does not know what becomes of."""
        self.restored: tuple[At, int, int] | None = None
        """The snapshot, and its step, that it started from."""
        self.stuck = False
        """In a collective whose peers are gone."""
        self.hung = False
        """It makes no step any more, and says nothing."""
        self.moved = 0.0
        """When it was last seen to get on."""
        self.stopping = False
        """Told to end."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def key(self) -> GroupKey:
        return (self.epoch, self.place.group_id, self.generation)

    @property
    def running(self) -> bool:
        return self.life in (Life.SPAWNING, Life.JOINING, Life.TRAINING)

    # What it says. The time is stamped on delivery.

    def spawned(self) -> e.WorkerSpawned:
        return e.WorkerSpawned(at=0.0, epoch=self.epoch, generation=self.generation, rank=self.rank, pid=1)

    def ready(self) -> e.WorkerReady:
        return e.WorkerReady(at=0.0, epoch=self.epoch, generation=self.generation, rank=self.rank)

    def returned(self) -> e.WorkerReturned:
        return e.WorkerReturned(at=0.0, epoch=self.epoch, generation=self.generation, rank=self.rank)

    def failed(self, failure: Failure) -> e.WorkerFailed:
        return e.WorkerFailed(
            at=0.0, epoch=self.epoch, generation=self.generation, rank=self.rank, failure=failure
        )

    def upload_failed(self, index: int) -> e.UploadFailed:
        return e.UploadFailed(
            at=0.0,
            epoch=self.epoch,
            generation=self.generation,
            rank=self.rank,
            index=index,
            reason="stalled",
        )

    def reported(
        self,
        upto: int,
        owed: tuple[int, ...] = (),
        parts: tuple[Part, ...] = (),
        copied: tuple[int, ...] = (),
    ) -> e.Reported:
        return e.Reported(
            at=0.0,
            epoch=self.epoch,
            generation=self.generation,
            rank=self.rank,
            upto=upto,
            owed=owed,
            parts=parts,
            copied=copied,
        )


class Host:
    def __init__(self, name: HostId, slice_: ModelSlice, index: int, slots: int, clock: EventClock) -> None:
        self.id = name
        self.slice = slice_
        self.index = index
        self.slots = slots
        self.alive = True
        self.frozen = False
        self.stuck = False
        """It can't end its workers: they hang in the kernel."""
        self.lost = False
        """The engine counts it as lost."""
        self.agent = False
        self.template = False
        self.attempt = 0
        """Counts preparations, so that an old one's outcome is known as such."""
        self.workers: list[ModelWorker] = []
        self.up = ModelChannel(clock)
        self.down = ModelChannel(clock)
        self.held_back: list[Callable[[], None]] = []
        """What reaches a frozen host, or would leave it, waits until it thaws."""

    @property
    def listed(self) -> bool:
        return self.alive and not self.lost


class ModelSlice:
    def __init__(self, name: SliceName) -> None:
        self.name = name
        self.hosts: list[Host] = []
        self.holder: str | None = None
        """``us``, ``other``, ``cleaning`` (given back, not yet empty), or nobody."""
        self.present = True
        self.doomed = False
        """It is being taken away at this moment."""

    @property
    def whole(self) -> bool:
        return self.present and all(host.listed for host in self.hosts)


class Reservation(msgspec.Struct):
    id: int
    slices: tuple[SliceName, ...]
    waiting: bool = True
