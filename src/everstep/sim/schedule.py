"""One schedule: a run, and what is done to it. The same seed is the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.backend.base import NoBackend
from everstep.checkpoint import Checkpoint
from everstep.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from everstep.control import commands as c
from everstep.control.deadlines import Deadlines
from everstep.driver import records
from everstep.driver.history import History
from everstep.driver.job import Job
from everstep.driver.lease import Lease, take
from everstep.driver.loop import Driver
from everstep.driver.registry import LiveRun, Registry
from everstep.errors import FencedError, RunOwnedError, StorageError
from everstep.sim.disk import Disk, Network, SimStore, View
from everstep.sim.hosts import Cluster, SimEngine, Training
from everstep.sim.rules import RUN, Rules
from everstep.sim.time import Process, RuleBroken, VirtualTime
from everstep.validation import ValidationConfig

TTL_S = 15.0
_CALM_S = 4000.0
"""After the last fault, a run must have ended within this time."""
_DEADLINES = Deadlines(orphan_s=120.0)


class ProcessClock:
    """Each machine's clock counts from a start of its own."""

    def __init__(self, time: VirtualTime, ahead: float) -> None:
        self._time = time
        self._ahead = ahead

    def now(self) -> float:
        return self._time.now + self._ahead

    def wall(self) -> float:
        return 1e9 + self._time.now


class NoRegistry(Registry):
    def publish(self, run: LiveRun) -> None:
        pass

    def forget(self, name: str) -> None:
        pass


class DriverStory:
    """What happened, for whoever looks at a schedule that failed. Also an ``Observer``."""

    def __init__(self, time: VirtualTime, keep: bool) -> None:
        self._time = time
        self._keep = keep
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        if self._keep:
            self.lines.append(f"{self._time.now:10.3f}  {line}")


@dataclass
class Watching:
    """An ``Observer`` of one driver."""

    story: DriverStory
    name: str

    def record(self, record: c.Record) -> None:
        self.story.tell(f"{self.name} {record}")

    def say(self, line: str) -> None:
        self.story.tell(f"{self.name} says: {line}")

    def output(self, rank: int, text: str) -> None:
        pass

    def opened(self, ledger: object) -> None:
        pass

    def started(self, run: LiveRun) -> None:
        pass

    def progress(self, rank: int, epoch: int, index: int, newest: object) -> None:
        pass

    def reported(self, of: object, rank: int, index: int, metrics: object) -> None:
        pass

    def committed(self, of: object, index: int, address: str) -> None:
        self.story.tell(f"{self.name} committed {address}")

    def close(self) -> None:
        pass


@dataclass
class Seat:
    """A driver's process."""

    process: Process
    engine: SimEngine
    network: Network
    over: bool = False
    finished: bool = False
    at_least: str | None = None
    """The newest checkpoint that was whole when it took the run."""
    has_started: bool = False


@dataclass
class Schedule:
    seed: int
    keep_story: bool = False
    time: VirtualTime = field(default_factory=VirtualTime)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.story = DriverStory(self.time, self.keep_story)
        self.disk = Disk(rng)
        self.rules = Rules(self.disk)
        workers = rng.choice([1, 2, 3])
        savers = frozenset(range(workers)) if rng.random() < 0.6 else frozenset({0})
        steps = rng.randrange(4, 20) if rng.random() < 0.8 else rng.randrange(40, 100)
        self.training = Training(workers, steps, rng.choice([1, 2, 3]), rng.choice([0.2, 0.5]), savers)
        self.keep = rng.choice([None, 1, 2, 3])
        self.rules.keep = self.keep
        self.scored = rng.random() < 0.3
        self.compact_after = rng.choice([3, 5, 10])
        self.cluster = Cluster(self.time, rng, View(self.disk, RUN), self.training, _DEADLINES.orphan_s)
        self.cluster.on_start = self._workers_start
        self.seats: list[Seat] = []
        self.calm = False
        self.ended = False
        for _ in range(workers):
            self.cluster.add_host()

    # ------------------------------------------------------------------ drivers

    def start_driver(self) -> None:
        process = Process(self.time, f"driver-{len(self.seats) + 1}")
        network = Network(self.rng, trouble=0.0 if self.calm else self.rng.choice([0.0, 0.0, 0.02, 0.1]))
        seat = Seat(process, SimEngine(process, self.cluster), network)
        self.seats.append(seat)
        self.story.tell(f"{process.name} starts")
        process.run(self._fit(seat))

    async def _fit(self, seat: Seat) -> None:
        """As ``Trainer.fit`` does it."""
        store = SimStore(seat.process, seat.network, View(self.disk, RUN))
        seat.engine.ahead = 1000.0 * len(self.seats)
        clock = ProcessClock(self.time, seat.engine.ahead)
        owner = records.Owner("machine", "boot", len(self.seats), 0)
        observer = Watching(self.story, seat.process.name)

        def opened(number: int) -> records.Opened:
            seat.at_least = next(reversed(self.rules.restorable()), None)
            return records.Opened(
                records.FORMAT, number, owner, clock.now(), clock.wall(), "0", "run",
                self.training.workers, self.training.workers, "", "", seat.process.name, TTL_S,
            )  # fmt: skip

        def is_over(history: History) -> bool:
            return history.outcome == c.Outcome.FINISHED.value

        try:
            lease = await take(
                store, opened, clock, observer.say,
                is_gone=lambda owner: not self.seats[owner.pid - 1].process.alive,
                is_over=is_over, compact_after=self.compact_after,
            )  # fmt: skip
            if isinstance(lease, Lease):
                await self._drive(seat, store, lease, observer, clock)
            else:
                seat.finished = True
        except (RunOwnedError, FencedError, StorageError) as error:
            self.story.tell(f"{seat.process.name} gives up: {error}")
        finally:
            if seat.process.alive:
                seat.over = True
                self._look_whether_it_is_over()

    async def _drive(
        self, seat: Seat, store: SimStore, lease: Lease, observer: Watching, clock: ProcessClock
    ) -> None:
        driver = Driver(self._job(), store, seat.engine, lease, observer, NoRegistry(), clock)
        await driver.drive()
        end = driver.outcome.end
        self.story.tell(f"{seat.process.name} ends: {end}")
        recorded = driver.outcome.unrecorded is None
        seat.finished = end is not None and end.outcome is c.Outcome.FINISHED and recorded
        if end is not None and end.outcome is c.Outcome.FAILED:
            raise RuleBroken(f"6: a run with budget left ends: {end}")

    def _job(self) -> Job:
        kept = CheckpointConfig(
            num_to_keep=self.keep, checkpoint_score_attribute="x" if self.scored and self.keep else None
        )
        run = RunConfig(
            name="run",
            storage_path="/nowhere",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=kept,
            deadlines=_DEADLINES,
            lease_ttl_s=TTL_S,
        )
        view = View(self.disk, RUN)
        return Job(
            "run", view, Path("/nowhere"), b"", b"", [], NoBackend(),
            ScalingConfig(num_workers=self.training.workers), run, 0, "", ".markers/x",
            validation=ValidationConfig(_size_of) if self.seed % 4 == 0 else None,
        )  # fmt: skip

    def _workers_start(self, engine: SimEngine, spec: object) -> None:
        from everstep.protocol import wire

        assert isinstance(spec, wire.WorkerSpec)
        seat = next(seat for seat in self.seats if seat.engine is engine)
        self.story.tell(f"{seat.process.name} starts rank {spec.member.rank} from {spec.checkpoint}")
        self.rules.check_start(spec.checkpoint, None if seat.has_started else seat.at_least)
        if spec.member.rank == self.training.workers - 1:
            seat.has_started = True

    # ------------------------------------------------------------------ faults

    def kill_driver(self, seat: Seat) -> None:
        if seat.process.alive and not seat.over:
            self.story.tell(f"{seat.process.name} is killed")
            seat.process.kill()
            seat.engine.died()
            self._look_whether_it_is_over()

    def fault(self) -> None:
        rng, live = self.rng, [seat for seat in self.seats if seat.process.alive and not seat.over]
        kind = rng.choice(_FAULTS)
        seconds = rng.choice([rng.uniform(0.0, 3.0), rng.uniform(0.0, 90.0)])
        self.story.tell(f"fault: {kind} {seconds:.1f}")
        match kind:
            case "kill driver" if live:
                self.kill_driver(rng.choice(live))
            case "pause driver" if live:
                rng.choice(live).process.pause(seconds)
            case "cut off driver" if live:
                rng.choice(live).network.cut_until = self.time.now + seconds
            case "another driver" if len(live) < 3:
                self.start_driver()
            case "replace driver" if live and len(live) < 3:
                # For long enough that the next one has taken the run, and put old records together.
                rng.choice(live).process.pause(rng.uniform(18.0, 45.0))
                self.start_driver()
            case "kill worker":
                self._kill_worker()
            case "kill host" if self.cluster.alive():
                self.cluster.kill_host(rng.choice(self.cluster.alive()))
            case "power cut":
                self._power_cut(live)
            case "disk full":
                self.disk.full = True
                self.time.after(seconds, lambda: setattr(self.disk, "full", False))
            case "slow disk":
                self.disk.bytes_per_s = rng.choice([50.0, 1000.0])
                self.time.after(seconds, lambda: setattr(self.disk, "bytes_per_s", 1e12))
            case "damage" if rng.random() < 0.2:
                self._damage()
            case _:
                pass

    def _kill_worker(self) -> None:
        agents = [agent for agent in self.cluster.alive() if agent.workers]
        if agents:
            agent = self.rng.choice(agents)
            agent.kill_worker(self.rng.choice(sorted(agent.workers)), by_us=False)

    def _power_cut(self, live: list[Seat]) -> None:
        for seat in live:
            self.kill_driver(seat)
        for agent in self.cluster.alive():
            self.cluster.kill_host(agent)

    def _damage(self) -> None:
        """One object of the journal is lost, or one of its bits."""
        names = self.disk.below(f"{RUN}journal/")
        if not names:
            return
        self.rules.damaged = True
        name = self.rng.choice(names)
        data = bytearray(self.disk.objects[name])
        if self.rng.random() < 0.5 or not data:
            self.disk.lose(name)
            self.rules.lost(name)
        else:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            self.disk.objects[name] = bytes(data)
        self.story.tell(f"damaged: {name}")

    # ------------------------------------------------------------------ from beginning to end

    def run(self) -> None:
        rng = self.rng
        View(self.disk, RUN).create(".markers/x", b"")
        self.start_driver()
        at = 0.0
        for _ in range(rng.randrange(0, 10)):
            at += rng.choice([rng.uniform(0.0, 1.0), rng.uniform(0.0, 5.0), rng.uniform(0.0, 40.0)])
            self.time.at(at, self.fault)
        self.time.at(at + 100.0, self._calm_down)
        self._user_looks()
        try:
            self.time.run(at + 100.0 + _CALM_S, self._is_over)
            if not self._is_over():
                raise RuleBroken("7: faults have ended, and the run does not")
            self.rules.check_end()
            self._check_rows()
        finally:
            for seat in self.seats:
                seat.process.bury()

    def _calm_down(self) -> None:
        self.calm = True
        self.story.tell("no more faults")
        self.disk.full, self.disk.bytes_per_s = False, 1e12
        for seat in self.seats:
            seat.network.trouble = 0.0
            seat.network.cut_until = 0.0

    def _user_looks(self) -> None:
        """Somebody starts the script again when nothing runs."""
        if not self._is_over():
            if not any(seat.process.alive and not seat.over for seat in self.seats):
                self.start_driver()
            self.time.after(self.rng.uniform(5.0, 30.0), self._user_looks)

    def _look_whether_it_is_over(self) -> None:
        self.ended = any(seat.finished and seat.over for seat in self.seats) and all(
            seat.over or not seat.process.alive for seat in self.seats
        )

    def _is_over(self) -> bool:
        return self.ended

    def _check_rows(self) -> None:
        """What agents were told to forget is in the journal."""
        if self.rules.damaged:
            return
        rows = self.rules.rows()
        for agent in self.cluster.agents:
            for worker in [*agent.workers.values(), *agent.ended.values()]:
                if worker.spec.member.rank == 0:
                    missing = worker.acknowledged_rows() - rows
                    if missing:
                        raise RuleBroken(f"records were acknowledged, and are not in the journal: {missing}")


_FAULTS = (
    "kill driver",
    "pause driver",
    "cut off driver",
    "another driver",
    "replace driver",
    "replace driver",
    "kill worker",
    "kill host",
    "power cut",
    "disk full",
    "slow disk",
    "damage",
)


def run_seed(seed: int) -> None:
    """Raises ``RuleBroken`` if something that must hold doesn't."""
    Schedule(seed).run()


def _size_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What validates in a simulation."""
    return {"size": len(checkpoint.path)}
