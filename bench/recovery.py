"""From the kill of a worker to the first new step of *all* ranks.

Workers of one torch process group train a small model, with an all-reduce in every step and a checkpoint
every few steps. A random rank, rank 0 included, gets SIGKILL at a random instant. The workers note the time
of each step, the killer that of the kill, by the same clock. One run goes through all rounds.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.sides import Drive, Side
from bench.steps import all_first_steps, attempts_since, newest_of_each_rank

TITLE = "SIGKILL of a random rank to the first new step of all ranks"
ROUNDS, PEER_ROUNDS = 20, 3

CONFIG = {"step_s": 0.01, "checkpoint_every": 5}
_QUIET_S = (0.5, 1.5)
"""Between a recovery and the next kill: any instant in here, alike likely."""


def measure(options: Options) -> Outcome:
    notes: list[str] = []
    ours = kill_again_and_again("everstep", options.rounds, options, notes)
    theirs = kill_again_and_again("ray", options.peer_rounds, options, notes) if options.peer_rounds else None
    row = Row(f"kill to first step of {options.workers} ranks", "s", ours, theirs)
    return Outcome("recovery", TITLE, (row,), tuple(notes))


def kill_again_and_again(
    side: Side,
    rounds: int,
    options: Options,
    notes: list[str],
    nodes: int = 0,
    function: str = "loops:train_until_told",
    config: dict[str, float] = CONFIG,
) -> Sample:
    dice = random.Random(options.seed)
    times: list[float] = []
    redone: list[int] = []
    killed: list[int] = []
    with Drive(side, function, config, options.workers, nodes=nodes) as drive:
        since = 0.0
        for at in range(rounds):
            all_stepped(drive, since, options.workers, "at the start")
            time.sleep(dice.uniform(*_QUIET_S))
            group = newest_of_each_rank(attempts_since(drive.folder, since))
            rank = dice.choice(sorted(group))
            kill = time.monotonic()
            os.kill(group[rank].pid, signal.SIGKILL)
            firsts = all_stepped(drive, kill, options.workers, f"after a kill of rank {rank}")
            times.append(max(when for when, _ in firsts.values()) - kill)
            reached = max(last[1] for last in (a.last() for a in group.values()) if last)
            redone.append(reached + 1 - min(step for _, step in firsts.values()))
            killed.append(rank)
            since = kill
            options.say(f"recovery: {side}: {at + 1} of {rounds}: rank {rank}, {times[-1]:.3f} s")
        (drive.folder / "stop").touch()
        drive.outcome()
        if side == "everstep":
            notes += phases_of(drive.folder / "storage" / "run")
    name = "Everstep" if side == "everstep" else "Ray Train"
    ranks = ", ".join(f"{rank} ({killed.count(rank)}×)" for rank in sorted(set(killed)))
    notes.append(
        f"{name}: killed ranks {ranks}; steps done twice: median {statistics.median(redone):g}, "
        f"at most {max(redone)}"
    )
    if drive.left_over:
        notes.append(f"{name}: {drive.left_over} processes were left over, and were ended")
    return Sample(tuple(times))


def all_stepped(drive: Drive, since: float, workers: int, when: str) -> dict[int, tuple[float, int]]:
    """Each rank's first step, in a process that began after ``since``; waits for the last of them."""

    def look() -> dict[int, tuple[float, int]] | None:
        return all_first_steps(attempts_since(drive.folder, since), workers)

    return drive.wait_for(look, f"the first step of all ranks, {when}")


def phases_of(run: Path) -> list[str]:
    """Where the time went, by Everstep's own account of each recovery."""
    from everstep.control.commands import Recovered
    from everstep.journal import journal

    found = [
        record for record in journal.read(run) if isinstance(record, Recovered) and record.cause is not None
    ]
    names = ("detect", "stop", "wait", "place", "start", "rendezvous", "restore", "first_step")
    medians = {n: 1000 * statistics.median(getattr(r, f"{n}_s") for r in found) for n in names if found}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.1f}" for name, value in medians.items() if value >= 0.05
    )
    states = sorted({record.state_from.partition(",")[0] for record in found} - {""})
    if states:
        shown += f"; state from {' and '.join(states)}"
    return [f"Everstep: milliseconds by phase, medians: {shown}"] if shown else []
