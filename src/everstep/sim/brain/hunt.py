"""Many fresh schedules, over several processes: how many hold, and short stories of those that don't."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from everstep.control.commands import Rung
from everstep.control.table import TRANSITIONS, Phase
from everstep.sim.brain.plants import PLANTS, planted
from everstep.sim.brain.run import ScheduleFailed, run_seed
from everstep.sim.brain.shrink import kind, shrink
from everstep.sim.brain.story import brief

CHUNK = 250
"""Schedules that a process gets at a time."""


@dataclass
class Found:
    """A schedule that fails, shrunk."""

    seed: int
    what: str
    scenario: str
    story: str
    faults: int
    faults_at_first: int


@dataclass
class Tally:
    """What became of some schedules."""

    schedules: int = 0
    violations: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    """The user had enough: these are those that were done by then."""
    outcomes: Counter[str] = field(default_factory=Counter)
    rungs: Counter[Rung] = field(default_factory=Counter)
    transitions: Counter[tuple[Phase, Phase]] = field(default_factory=Counter)
    found: dict[str, Found] = field(default_factory=dict)
    """The lowest seed of each kind of violation."""

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.violations += other.violations
        self.outcomes += other.outcomes
        self.rungs += other.rungs
        self.transitions += other.transitions
        for name, found in other.found.items():
            if name not in self.found or found.seed < self.found[name].seed:
                self.found[name] = found

    @property
    def never_taken(self) -> list[str]:
        return [f"{a.value} → {b.value}" for a, b in TRANSITIONS if not self.transitions[(a, b)]]


def try_seeds(first: int, count: int, plant: str | None = None, stop: bool = False) -> Tally:
    """In this process. ``stop``: at the first that fails."""
    tally = Tally()
    # What a schedule makes refers to itself in circles: it is swept between schedules, not during them.
    gc.disable()
    try:
        with planted(PLANTS[plant] if plant is not None else None):
            for seed in range(first, first + count):
                _try_one(seed, tally)
                if tally.schedules % CHUNK == 0:
                    gc.collect()
                if stop and tally.violations:
                    break
    finally:
        gc.enable()
    return tally


def _try_one(seed: int, tally: Tally) -> None:
    tally.schedules += 1
    try:
        result = run_seed(seed)
    except ScheduleFailed as finding:
        tally.violations += 1
        if kind(finding.what) not in tally.found:
            tally.found[kind(finding.what)] = _tell(finding)
        return
    tally.outcomes[result.outcome.value] += 1
    tally.rungs += result.rungs
    tally.transitions += result.transitions


def _tell(finding: ScheduleFailed) -> Found:
    short = shrink(finding)
    return Found(
        finding.scenario.seed,
        short.what,
        brief(short.scenario),
        short.story.text(),
        len(short.scenario.strikes),
        len(finding.scenario.strikes),
    )


def hunt(
    first: int,
    count: int,
    *,
    jobs: int = 1,
    plant: str | None = None,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Try ``count`` seeds from ``first`` on. With a plant in, the first finding is the end."""
    total, began = Tally(), time.monotonic()
    stop = plant is not None
    pieces = [(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)]
    try:
        for piece in _in_order(pieces, jobs, plant, stop):
            total.add(piece)
            total.seconds = time.monotonic() - began
            progress(total)
            if stop and total.violations:
                break
    except KeyboardInterrupt:
        total.interrupted = True
    total.seconds = time.monotonic() - began
    return total


def _in_order(pieces: list[tuple[int, int]], jobs: int, plant: str | None, stop: bool) -> Iterator[Tally]:
    """As they are done; with ``stop``, in the order of their seeds, so that what is found first is the same
    with any number of processes.
    """
    if jobs <= 1 or stop:
        for at, size in pieces:
            yield try_seeds(at, size, plant, stop)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: set[Future[Tally]] = set()
        left = iter(pieces)
        try:
            while True:
                while len(waiting) < 2 * jobs and (piece := next(left, None)) is not None:
                    waiting.add(pool.submit(try_seeds, *piece, plant))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in waiting:
                future.cancel()
