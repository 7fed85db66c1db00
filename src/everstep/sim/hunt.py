"""Many fresh schedules of the driver, over several processes: how many hold, and which don't."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from everstep.sim.mistakes import MISTAKES, made
from everstep.sim.schedule import Schedule

CHUNK = 50
"""Schedules that a process gets at a time."""


@dataclass
class DriverTally:
    """What became of some schedules."""

    schedules: int = 0
    seconds: float = 0.0
    found: dict[int, str] = field(default_factory=dict)
    """What did not hold, by seed."""
    interrupted: bool = False

    def add(self, other: DriverTally) -> None:
        self.schedules += other.schedules
        self.found |= other.found


def try_seeds(first: int, count: int, mistake: str | None = None, stop: bool = False) -> DriverTally:
    """In this process. ``stop``: at the first that fails."""
    tally = DriverTally()
    # What a schedule makes refers to itself in circles: it is swept between schedules, not during them.
    gc.disable()
    try:
        with made(MISTAKES[mistake] if mistake is not None else None):
            for seed in range(first, first + count):
                tally.schedules += 1
                what = failure_of(Schedule(seed))
                if what:
                    tally.found[seed] = what
                    if stop:
                        break
                if tally.schedules % CHUNK == 0:
                    gc.collect()
    finally:
        gc.enable()
    return tally


def failure_of(schedule: Schedule) -> str:
    """What did not hold; empty if everything did."""
    try:
        schedule.run()
    except Exception as error:  # a driver that is wrong may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def tell(seed: int, mistake: str | None = None) -> tuple[str, str]:
    """(the story of one schedule, what did not hold)."""
    schedule = Schedule(seed, keep_story=True)
    with made(MISTAKES[mistake] if mistake is not None else None):
        what = failure_of(schedule)
    return "\n".join(schedule.story.lines), what


def hunt(
    first: int,
    count: int,
    *,
    jobs: int = 1,
    mistake: str | None = None,
    progress: Callable[[DriverTally], None] = lambda tally: None,
) -> DriverTally:
    """Try ``count`` seeds from ``first`` on. With a mistake in, the first finding is the end."""
    total, began = DriverTally(), time.monotonic()
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


def _in_parallel(pieces: list[tuple[int, int]], jobs: int, mistake: str | None) -> Iterator[DriverTally]:
    if jobs <= 1:
        for at, size in pieces:
            yield try_seeds(at, size, mistake, stop=mistake is not None)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: set[Future[DriverTally]] = set()
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
