"""Replica groups over torchft: how long a killed one is away, and how long the others stop.

Each worker is a group. A random one, rank 0 included, gets SIGKILL at a random instant. The workers note the
time of each step that they make together, the killer that of the kill, by the same clock.
"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.sides import Drive, Side
from bench.steps import attempts_since, newest_of_each_rank

TITLE = "SIGKILL of a replica group to its first step with the others, and the longest gap of those"
ROUNDS, PEER_ROUNDS = 20, 3

_CONFIG = {"step_s": 0.01}
_QUIET_S = (0.5, 1.5)


def measure(options: Options) -> Outcome:
    ours = _kill_again_and_again("everstep", options.rounds, options)
    theirs = _kill_again_and_again("ray", options.peer_rounds, options) if options.peer_rounds else None
    rows = (
        Row("kill to first step together", "s", ours[0], theirs[0] if theirs else None),
        Row("longest gap of the others", "s", ours[1], theirs[1] if theirs else None),
    )
    return Outcome("replica_groups", TITLE, rows, ())


def _kill_again_and_again(side: Side, rounds: int, options: Options) -> tuple[Sample, Sample]:
    dice = random.Random(options.seed)
    back: list[float] = []
    gaps: list[float] = []
    with Drive(side, "torchft_loop:train_until_told", _CONFIG, options.workers, torchft=True) as drive:
        since = 0.0
        for at in range(rounds):
            _all_step(drive, options.workers, since)
            time.sleep(dice.uniform(*_QUIET_S))
            group = newest_of_each_rank(attempts_since(drive.folder, 0.0))
            rank = dice.choice(sorted(group))
            kill = since = time.monotonic()
            os.kill(group[rank].pid, signal.SIGKILL)
            back.append(_stepped(drive, rank, kill) - kill)
            survivors = [attempt for r, attempt in group.items() if r != rank]
            gaps.append(max(_longest_gap(attempt.times(), kill) for attempt in survivors))
            options.say(
                f"replica_groups: {side}: {at + 1} of {rounds}: rank {rank}, back after {back[-1]:.3f} s, "
                f"others' longest gap {gaps[-1]:.3f} s"
            )
        (drive.folder / "stop").touch()
        drive.outcome()
    return Sample(tuple(back)), Sample(tuple(gaps))


def _all_step(drive: Drive, workers: int, since: float) -> None:
    """Every rank has made a step, after ``since``."""

    def look() -> bool | None:
        newest = newest_of_each_rank(attempts_since(drive.folder, 0.0))
        lasts = [attempt.last() for attempt in newest.values()]
        return True if len(lasts) == workers and all(last and last[0] > since for last in lasts) else None

    drive.wait_for(look, "a step of every group")


def _stepped(drive: Drive, rank: int, kill: float) -> float:
    def look() -> float | None:
        attempt = newest_of_each_rank(attempts_since(drive.folder, kill)).get(rank)
        first = attempt.first() if attempt is not None else None
        return first[0] if first else None

    return drive.wait_for(look, f"the first step of rank {rank}, after its kill")


def _longest_gap(times: list[float], kill: float) -> float:
    return max((b - a for a, b in pairwise(times) if b > kill), default=0.0)
