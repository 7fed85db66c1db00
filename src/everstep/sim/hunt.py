"""Many fresh schedules, over several processes: how many hold, and which don't."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from everstep.control.commands import Rung
from everstep.control.table import TRANSITIONS, Phase
from everstep.process import kernel
from everstep.sim.mistakes import MISTAKES
from everstep.sim.planting import planted
from everstep.sim.scenario import draw
from everstep.sim.schedule import Schedule
from everstep.sim.shrink import failure_of, kind

CHUNK = 50
"""Schedules that a process gets at a time."""


@dataclass
class Tally:
    """What became of some schedules."""

    schedules: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    """The user had enough: these are those that were done by then."""
    outcomes: Counter[str] = field(default_factory=Counter)
    rungs: Counter[Rung] = field(default_factory=Counter)
    transitions: Counter[tuple[Phase, Phase]] = field(default_factory=Counter)
    found: dict[int, str] = field(default_factory=dict)
    """What did not hold, by seed."""

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.outcomes += other.outcomes
        self.rungs += other.rungs
        self.transitions += other.transitions
        self.found |= other.found

    def count(self, schedule: Schedule) -> None:
        """One that holds."""
        assert schedule.outcome is not None
        self.outcomes[schedule.outcome.value] += 1
        self.rungs += schedule.facts.rungs
        self.transitions += schedule.facts.transitions

    @property
    def never_taken(self) -> list[str]:
        return [f"{a.value} → {b.value}" for a, b in TRANSITIONS if not self.transitions[(a, b)]]

    @property
    def kinds(self) -> dict[int, str]:
        """The lowest seed of each kind of violation, with what did not hold."""
        first = {kind(self.found[seed]): seed for seed in sorted(self.found, reverse=True)}
        return {seed: self.found[seed] for seed in sorted(first.values())}


def try_seeds(first: int, count: int, mistake: str | None = None, stop: bool = False) -> Tally:
    """In this process. ``stop``: at the first that fails. With a mistake in, only schedules that can show it
    are tried.
    """
    tally = Tally()
    # What a schedule makes refers to itself in circles: it is swept between schedules, not during them, and
    # what was there before is not scanned again and again.
    gc.disable()
    gc.freeze()
    try:
        with planted(MISTAKES[mistake] if mistake is not None else None):
            for seed in range(first, first + count):
                scenario = draw(seed)
                if mistake is not None and not MISTAKES[mistake].shows(scenario):
                    continue
                tally.schedules += 1
                schedule = Schedule(scenario)
                if what := failure_of(schedule):
                    tally.found[seed] = what
                    if stop:
                        break
                else:
                    tally.count(schedule)
                    schedule.story.lines.clear()  # most of what there is to sweep
                if tally.schedules % CHUNK == 0:
                    gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return tally


def hunt(
    first: int,
    count: int,
    *,
    jobs: int = 1,
    mistake: str | None = None,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Try ``count`` seeds from ``first`` on. With a mistake in, the first finding is the end."""
    total, began = Tally(), time.monotonic()
    pieces = [(at, min(CHUNK, first + count - at)) for at in range(first, first + count, CHUNK)]
    try:
        for piece in _in_parallel(pieces, 1 if mistake else jobs, mistake):
            total.add(piece)
            total.seconds = time.monotonic() - began
            progress(total)
            if mistake and total.found:
                break
    except KeyboardInterrupt:
        total.interrupted = True
    total.seconds = time.monotonic() - began
    return total


def _in_parallel(pieces: list[tuple[int, int]], jobs: int, mistake: str | None) -> Iterator[Tally]:
    if jobs <= 1:
        for at, size in pieces:
            yield try_seeds(at, size, mistake, stop=mistake is not None)
        return
    # Processes that wait for work don't notice that the one that hands it out was killed.
    pool = ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=kernel.die_with_parent,
        initargs=(os.getpid(),),
    )
    with pool:
        waiting: set[Future[Tally]] = set()
        left = iter(pieces)
        try:
            while True:
                while len(waiting) < 2 * jobs and (piece := next(left, None)) is not None:
                    waiting.add(pool.submit(try_seeds, *piece))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in waiting:
                future.cancel()
