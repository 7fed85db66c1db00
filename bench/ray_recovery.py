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

from bench.figures import Outcome, Row, Sample
from bench.options import Options
from bench.recovery import CONFIG, all_stepped, kill_again_and_again
from bench.sides import Drive

TITLE = "On a Ray cluster: SIGKILL of a random rank, and of a raylet"
ROUNDS, PEER_ROUNDS = 20, 3
NODES = 2
MOST_NODE_LOSSES = 5
"""Each takes a cluster of its own."""


def measure(options: Options) -> Outcome:
    notes: list[str] = []
    ours = kill_again_and_again("everstep", options.rounds, options, notes, nodes=NODES)
    theirs = kill_again_and_again("ray", options.peer_rounds, options, notes) if options.peer_rounds else None
    losses = [_lose_a_node(options, options.seed + n) for n in range(min(options.rounds, MOST_NODE_LOSSES))]
    rows = (
        Row(f"kill to first step of {options.workers} ranks", "s", ours, theirs),
        Row("raylet killed: noticed", "s", Sample(tuple(noticed for noticed, _ in losses)), None),
        Row(
            f"raylet killed: first step of the {options.workers // NODES} ranks that remain",
            "s",
            Sample(tuple(stepped for _, stepped in losses)),
            None,
        ),
    )
    return Outcome("ray_recovery", TITLE, rows, tuple(notes))


def _lose_a_node(options: Options, seed: int) -> tuple[float, float]:
    """Seconds from the kill until it was noticed, and until what remains trains again."""
    from everstep.control.commands import FailureSeen
    from everstep.driver import journal

    with Drive(
        "everstep", "loops:train_until_told", CONFIG, options.workers, nodes=NODES, elastic=True
    ) as drive:
        all_stepped(drive, 0.0, options.workers, "at the start")
        dice = random.Random(seed)
        time.sleep(dice.uniform(0.5, 1.5))
        raylet = dice.choice(json.loads((drive.folder / "raylets.json").read_bytes()))
        kill = time.monotonic()
        os.kill(raylet, signal.SIGKILL)
        firsts = all_stepped(drive, kill, options.workers // NODES, "after a kill of a raylet")
        seen = [
            record.at
            for record in journal.read(drive.folder / "storage" / "run")
            if isinstance(record, FailureSeen) and record.at > kill and record.failure.host is not None
        ]
        stepped = max(when for when, _ in firsts.values()) - kill
        options.say(
            f"ray_recovery: a raylet: noticed after {min(seen) - kill:.3f} s, training {stepped:.3f} s"
        )
        (drive.folder / "stop").touch()
        drive.outcome()
    return min(seen) - kill, stepped
