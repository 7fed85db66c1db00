"""The drivers of a simulated run: production drivers, each in a process of its own, with its own clock and
its own way to the store. Several may live at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.backend.base import NoBackend
from everstep.checkpoint import Checkpoint
from everstep.config import CheckpointConfig, FailureConfig, MemoryConfig, RunConfig, ScalingConfig
from everstep.control import commands as c, events as e
from everstep.control.commands import Outcome
from everstep.control.controller import Controller
from everstep.control.settings import Settings
from everstep.driver.job import Job
from everstep.driver.loop import Driver
from everstep.errors import FencedError, RunOwnedError, StorageError
from everstep.journal import records
from everstep.journal.history import History
from everstep.journal.lease import Lease, take
from everstep.observe.registry import LiveRun, Registry
from everstep.sim.cluster import Cluster
from everstep.sim.disk import Disk, Network, SimStore, View
from everstep.sim.engine import SimEngine
from everstep.sim.rules import RUN, Rules
from everstep.sim.scenario import FaultKind, Scenario
from everstep.sim.story import Story
from everstep.sim.time import Process, VirtualTime
from everstep.storage.shared import leave_marker
from everstep.validation import ValidationConfig

TTL_S = 15.0
_SET_BY = (-86_400.0, 0.0, 20.0)
"""By how much clocks that say UNIX time have been set, from one driver to the next."""


def machine_of(number: int) -> int:
    """Where the driver of this number runs: two follow each other on each machine."""
    return (number + 1) // 2


class ProcessClock:
    """Each machine's clock counts from a start of its own. What it says of UNIX time may have been set."""

    def __init__(self, time: VirtualTime, ahead: float, wall_ahead: float) -> None:
        self._time = time
        self._ahead = ahead
        self._wall_ahead = wall_ahead

    def now(self) -> float:
        return self._time.now + self._ahead

    def wall(self) -> float:
        return 1e9 + self._time.now + self._wall_ahead


class NoRegistry(Registry):
    def publish(self, run: LiveRun) -> None:
        pass

    def forget(self, name: str) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class SimJob(Job):
    """A job whose settings are the scenario's, also where no config has them."""

    drawn: Settings

    def settings(self) -> Settings:
        return self.drawn


@dataclass
class Watching:
    """An ``Observer`` of one driver, for the story."""

    story: Story
    time: VirtualTime
    name: str

    def record(self, record: c.Record) -> None:
        pass  # it is a command of the controller's

    def say(self, line: str) -> None:
        self.story.add(self.time.now, self.name, line)

    def output(self, rank: int, text: str) -> None:
        pass

    def opened(self, ledger: object) -> None:
        pass

    def started(self, run: LiveRun) -> None:
        pass

    def progress(self, rank: int, epoch: int, index: int, newest: object) -> None:
        pass

    def reported(self, of: object, rank: int, index: int, metrics: object, saves: bool) -> None:
        pass

    def unsaved(self, of: object, index: int) -> None:
        pass

    def committed(self, of: object, index: int, address: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Seat:
    """A driver's process."""

    number: int
    process: Process
    engine: SimEngine
    network: Network
    driver: Driver | None = None
    over: bool = False
    outcome: Outcome | None = None
    """How the run ended, if it did by this driver."""
    at_least: str | None = None
    """The newest checkpoint that was whole when it took the run."""
    first_epoch: int = 0
    """The first that it started."""

    @property
    def lives(self) -> bool:
        return self.process.alive and not self.over

    @property
    def name(self) -> str:
        return self.process.name


Watch = Callable[["Seat", Controller], None]


@dataclass
class Seats:
    """All of them, in the order in which they were started. ``watch`` is called with every controller."""

    scenario: Scenario
    time: VirtualTime
    rng: random.Random
    cluster: Cluster
    disk: Disk
    rules: Rules
    story: Story
    watch: Watch
    every: list[Seat] = field(default_factory=list)
    code: int = 0
    """Which version of the training function the next one has."""

    def living(self) -> list[Seat]:
        return [seat for seat in self.every if seat.lives]

    def owner(self) -> Seat | None:
        """Whose record was the last to take the run, if it lives."""
        return next((s for s in self.every if s.name == self.rules.owner and s.lives), None)

    @property
    def outcome(self) -> Outcome | None:
        return next((seat.outcome for seat in reversed(self.every) if seat.outcome is not None), None)

    def look_after(self) -> None:
        """Somebody starts the script again when nothing runs."""
        if self.outcome is None:
            self.start_again()
            self.time.after(self.rng.uniform(1.0, 20.0), self.look_after)

    def start_again(self) -> None:
        """If nobody drives, and the run has not ended."""
        if self.outcome is None and not self.living():
            self.start()

    def start(self) -> None:
        number = len(self.every) + 1
        process = Process(self.time, f"driver-{number}")
        ahead = (1000.0 + self.scenario.clock_apart) * machine_of(number)
        if self.every and self.cluster.chance(self.scenario.new_code):
            self.code += 1
        trouble = 0.0 if self.cluster.calm else self.scenario.lost_answers
        seat = Seat(number, process, SimEngine(process, self.cluster, ahead), self._network(trouble))
        self.every.append(seat)
        self._note(seat, "starts")
        process.run(self._fit(seat))

    def _network(self, trouble: float) -> Network:
        slow = not self.cluster.calm and bool(self.scenario.families & {FaultKind.STORAGE, FaultKind.DISK})
        return Network(self.rng, trouble=trouble, slowest=20.0 if slow else 2.0)

    def kill(self, seat: Seat) -> None:
        if seat.lives:
            self._note(seat, "is killed")
            seat.process.kill()
            seat.engine.died()
            self._look_whether_it_is_over()

    def calm_down(self) -> None:
        for seat in self.every:
            seat.network.trouble = seat.network.cut_until = 0.0
            seat.network.slowest = 2.0

    def bury(self) -> None:
        for seat in self.every:
            seat.process.bury()

    def _note(self, seat: Seat, what: str) -> None:
        self.story.add(self.time.now, seat.name, what)

    async def _fit(self, seat: Seat) -> None:
        """As ``Trainer.fit`` does it."""
        store = SimStore(seat.process, seat.network, View(self.disk, RUN))
        clock = ProcessClock(self.time, seat.engine.ahead, _SET_BY[seat.number % len(_SET_BY)])
        owner = records.Owner("machine", f"boot-{machine_of(seat.number)}", seat.number, 0)
        observer = Watching(self.story, self.time, seat.name)
        settings = self.scenario.settings

        def opened(number: int) -> records.Opened:
            lists_lag = FaultKind.LISTING in self.scenario.families
            found = self.rules.known() if lists_lag else self.rules.restorable()
            seat.at_least = next(reversed(found), None)
            return records.Opened(
                records.FORMAT, number, owner, clock.now(), clock.wall(), "0", "run",
                settings.workers_min, settings.workers_max, "", "", seat.name, TTL_S,
            )  # fmt: skip

        def is_over(history: History) -> bool:
            return history.outcome == Outcome.FINISHED.value

        try:
            lease = await take(
                store, opened, clock, observer.say,
                is_gone=lambda owner: not self.every[owner.pid - 1].process.alive,
                is_over=is_over, compact_after=self.scenario.compact_after, token=self._token,
            )  # fmt: skip
            if isinstance(lease, Lease):
                driver = seat.driver = Driver(
                    self._job(), store, seat.engine, lease, observer, NoRegistry(), clock
                )
                self.watch(seat, driver.controller)
                await store.call(lambda blocking: leave_marker(blocking, lease.number))
                await driver.drive()
                seat.outcome = self._outcome(seat, driver)
            else:
                seat.outcome = Outcome.FINISHED
        except (RunOwnedError, FencedError, StorageError) as error:
            self._note(seat, f"gives up: {error}")
        finally:
            if seat.process.alive:
                seat.over = True
                self._look_whether_it_is_over()

    def _token(self) -> str:
        return f"{self.rng.getrandbits(32):08x}"

    def _outcome(self, seat: Seat, driver: Driver) -> Outcome | None:
        end, unrecorded = driver.outcome.end, driver.outcome.unrecorded
        self._note(seat, f"ends: {end}{f', unrecorded: {unrecorded}' if unrecorded else ''}")
        if end is None or end.outcome is Outcome.FENCED or unrecorded is not None:
            return None
        return end.outcome

    def _job(self) -> SimJob:
        scenario, settings = self.scenario, self.scenario.settings
        elastic = settings.workers_min < settings.workers_max
        run = RunConfig(
            name="run",
            storage_path="/nowhere",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(
                num_to_keep=scenario.keep,
                checkpoint_score_attribute="x" if scenario.scored else None,
                memory=MemoryConfig() if scenario.snapshots else None,
            ),
            deadlines=settings.deadlines,
            lease_ttl_s=TTL_S,
        )
        scaling = ScalingConfig(
            num_workers=(settings.workers_min, settings.workers_max) if elastic else settings.workers_max,
            replica_group_size=settings.group_size,
        )
        return SimJob(
            name="run",
            store=View(self.disk, RUN),
            logs=Path("/nowhere"),
            code=b"",
            arguments=b"",
            preload=[],
            backend=NoBackend(),
            scaling=scaling,
            run=run,
            seed=0,
            fingerprint=f"code-{self.code}",
            marker=".markers/x",
            validation=ValidationConfig(_size_of) if scenario.validates else None,
            drawn=settings,
        )

    def stop(self, kind: e.StopKind, now: bool) -> None:
        """The user's Ctrl-C reaches the driver that drives."""
        for seat in self.living():
            if seat.driver is not None:
                seat.driver.stop(kind, now)

    def _look_whether_it_is_over(self) -> None:
        self.time.over = self.outcome is not None and not self.living()


def _size_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What validates in a simulation."""
    return {"size": len(checkpoint.path)}
