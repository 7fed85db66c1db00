"""The same as ``recovery``, on a Ray cluster of two nodes; and what the loss of a node costs.

The cluster is real and on this machine. A node is lost by SIGKILL of its raylet: Ray's own health check takes
some 15 s to say so. Half of the workers are enough, so that training goes on with what remains.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.recovery import CONFIG, all_stepped, kill_again_and_again
from bench.sides import Drive, Side

TITLE = "On a Ray cluster: SIGKILL of a random rank, and of a raylet"
ROUNDS, PEER_ROUNDS = 20, 3
NODES = 2
MOST_NODE_LOSSES = 5
"""Each takes a cluster of its own."""


def measure(options: Options) -> Outcome:
    notes: list[str] = []
    ours = kill_again_and_again("everstep", options.rounds, options, notes, nodes=NODES)
    noticed, back = _lose_nodes("everstep", options.rounds, options)
    theirs = their_back = None
    if options.peer_rounds:
        theirs = kill_again_and_again("ray", options.peer_rounds, options, notes, nodes=NODES)
        _, their_back = _lose_nodes("ray", options.peer_rounds, options)
    remain = options.workers // NODES
    rows = (
        Row(f"kill to first step of {options.workers} ranks", "s", ours, theirs),
        Row("raylet killed: noticed", "s", noticed, None),
        Row(f"raylet killed: first step of the {remain} ranks that remain", "s", back, their_back),
    )
    return Outcome("ray_recovery", TITLE, rows, tuple(notes))


def _lose_nodes(side: Side, rounds: int, options: Options) -> tuple[Sample | None, Sample]:
    """Seconds from the kill until it was noticed, if that side tells, and until what remains trains again."""
    noticed: list[float] = []
    back: list[float] = []
    for at in range(min(rounds, MOST_NODE_LOSSES)):
        with Drive(
            side, "loops:train_until_told", CONFIG, options.workers, nodes=NODES, elastic=True
        ) as drive:
            all_stepped(drive, 0.0, options.workers, "at the start")
            dice = random.Random(options.seed + at)
            time.sleep(dice.uniform(0.5, 1.5))
            raylet = dice.choice(json.loads((drive.folder / "raylets.json").read_bytes()))
            kill = time.monotonic()
            os.kill(raylet, signal.SIGKILL)
            firsts = all_stepped(drive, kill, options.workers // NODES, "after a kill of a raylet")
            back.append(max(when for when, _ in firsts.values()) - kill)
            options.say(f"ray_recovery: {side}: a raylet: training again after {back[-1]:.3f} s")
            if side == "everstep":
                noticed.append(_noticed(drive.folder / "storage" / "run", kill) - kill)
            (drive.folder / "stop").touch()
            drive.outcome()
    return Sample(tuple(noticed)) if noticed else None, Sample(tuple(back))


def _noticed(run: Path, kill: float) -> float:
    """When the journal first says that a host was lost."""
    from everstep.control.commands import FailureSeen
    from everstep.journal import journal

    return min(
        record.at
        for record in journal.read(run)
        if isinstance(record, FailureSeen) and record.at > kill and record.failure.host is not None
    )
