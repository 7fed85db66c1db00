"""Hands for one brain, for tests that tell it single things: they answer at once, unless told not to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from everstep.control import commands as c, events as e
from everstep.control.controller import Controller, Settings, beliefs_of
from everstep.control.run import Run as RunState
from everstep.control.table import Phase
from everstep.failures import Failure, Kind
from everstep.saved.reports import Part
from everstep.topology.placement import Assignment
from everstep.topology.slices import HostView

C = TypeVar("C", bound=c.Command)


def views(*slices: str, hosts: int = 1, slots: int = 1) -> list[HostView]:
    return [HostView(f"{name}.{i}", name, i, slots, hosts) for name in slices for i in range(hosts)]


class Hands:
    """``silent`` holds the kinds of commands that get no answer."""

    def __init__(
        self, settings: Settings, hosts: Iterable[HostView], opened: e.RunOpened | None = None
    ) -> None:
        self.brain = Controller(settings)
        self.settings = settings
        self.now = 0.0
        self.hosts = {host.id: host for host in hosts}
        self.said: list[c.Command] = []
        """All commands since the last ``forget``."""
        self.silent: set[type[c.Command]] = set()
        self.saves_state = False
        """Checkpoints hold the training state, and not what the function made itself."""
        self.timers: dict[tuple[e.TimerName, int], float] = {}
        self.places: dict[int, Assignment] = {}
        self.generations: dict[int, int] = {}
        self._queue: deque[e.Event] = deque()
        self._busy = False
        self.capacity()
        self.tell(opened or e.RunOpened(at=0.0))

    # ------------------------------------------------------------------ telling and hearing

    @property
    def state(self) -> RunState:
        return beliefs_of(self.brain)

    def tell(self, event: e.Event) -> None:
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        while self._queue:
            event = msgspec.structs.replace(self._queue.popleft(), at=self.now)
            for command in self.brain.handle(event):
                self.said.append(command)
                self._answer(command)
        self._busy = False

    def _answer(self, command: c.Command) -> None:
        match command:
            case c.SetTimer():
                self.timers[(command.timer, command.key)] = command.at
            case c.CancelTimer():
                self.timers.pop((command.timer, command.key), None)
            case c.StartWorkers():
                self.generations.update(command.generations)
                self.places.update((a.rank, a) for a in command.assignments)
        if type(command) in self.silent:
            return
        match command:
            case c.Reserve():
                self.tell(e.Reserved(at=0.0, reservation=command.reservation))
            case c.PrepareHost():
                self.tell(e.HostPrepared(at=0.0, host=command.host))
            case c.StartWorkers():
                for a in command.assignments:
                    self.ready(a.rank)
            case c.StopWorkers():
                self.gone(command)
            case c.CommitCheckpoint():
                self.tell(
                    e.CheckpointCommitted(at=0.0, folder=command.checkpoint.folder, state=self.saves_state)
                )

    def pass_time(self, seconds: float) -> None:
        """Time goes on, and timers fire."""
        until = self.now + seconds
        while due := [(at, key) for key, at in self.timers.items() if at <= until]:
            at, key = min(due)
            del self.timers[key]
            self.now = max(self.now, at)
            self.tell(e.TimerFired(at=0.0, timer=key[0], key=key[1]))
        self.now = until

    def all(self, kind: type[C]) -> list[C]:
        return [command for command in self.said if isinstance(command, kind)]

    def last(self, kind: type[C]) -> C:
        return self.all(kind)[-1]

    def forget(self) -> None:
        self.said.clear()

    @property
    def phases(self) -> list[str]:
        return [command.phase for command in self.all(c.PhaseChanged)]

    # ------------------------------------------------------------------ what may happen

    def capacity(self, *more: HostView) -> None:
        self.hosts.update((host.id, host) for host in more)
        self.tell(e.CapacityChanged(at=0.0, hosts=tuple(self.hosts.values())))

    def about(self, rank: int) -> dict[str, int]:
        group = self.places[rank].group_id
        return {"epoch": self.brain.epoch, "generation": self.generations[group], "rank": rank}

    def ready(self, rank: int) -> None:
        self.tell(e.WorkerSpawned(at=0.0, pid=rank, **self.about(rank)))
        self.tell(e.WorkerReady(at=0.0, **self.about(rank)))

    def fail(
        self, rank: int, kind: Kind = Kind.EXCEPTION, *, echo: bool = False, message: str = "boom"
    ) -> None:
        failure = Failure(kind, self.now, message, rank=rank, host=self.places[rank].host, echo=echo)
        self.tell(e.WorkerFailed(at=0.0, failure=failure, **self.about(rank)))

    def returns(self, *ranks: int) -> None:
        for rank in ranks:
            self.tell(e.WorkerReturned(at=0.0, **self.about(rank)))

    def gone(self, command: c.StopWorkers) -> None:
        self.tell(
            e.WorkersGone(
                at=0.0,
                host=command.host,
                epoch=command.epoch,
                generation=command.generation,
                ranks=command.ranks,
            )
        )

    def lose(self, host: str, *, kind: Kind = Kind.HOST_LOST, since: float = 0.0) -> None:
        self.hosts[host] = msgspec.structs.replace(self.hosts[host], alive=False)
        failure = Failure(kind, self.now - since, "connection broken", host=host)
        self.tell(e.HostLost(at=0.0, host=host, failure=failure))

    def notice(self, host: str, seconds: float) -> None:
        self.tell(e.PreemptionNotice(at=0.0, host=host, deadline=self.now + seconds))

    def report(
        self,
        rank: int,
        index: int,
        *,
        part: bool = False,
        owed: tuple[int, ...] = (),
        held: bool = True,
        taken: bool = False,
    ) -> None:
        group = self.places[rank].group_id
        folder = f"e{self.brain.epoch}-g{group}-k{index}"
        parts = (Part(index, folder, held=held),) if part else ()
        snapshots = (index,) if taken else ()
        self.tell(e.Reported(at=0.0, upto=index, owed=owed, parts=parts, taken=snapshots, **self.about(rank)))

    def checkpoint(self, index: int, ranks: Iterable[int] | None = None) -> None:
        """Every rank brings its part, or each of these."""
        for rank in sorted(self.places) if ranks is None else ranks:
            self.report(rank, index, part=True)

    def reserve_fails(self, reason: str = "taken") -> None:
        self.tell(e.ReservationFailed(at=0.0, reservation=self.last(c.Reserve).reservation, reason=reason))


Run = Callable[..., Hands]


def stage(hands: Hands) -> Phase:
    """Of the one restart that is under way; the run's own phase, if that is of all workers."""
    (restart,) = hands.state.restarts
    return restart.stage
