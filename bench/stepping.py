"""Steps of 10 ms: the training function of the overhead benchmark, and the same without Everstep.
``python -m bench.stepping '{"steps": …}'`` is the latter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S = 0.010


def take_steps(config: dict[str, Any]) -> None:
    """Report each."""
    import everstep as train

    rank = train.get_context().get_world_rank()
    _note(config, rank, lambda step: train.report({"loss": 1.0 / step}))


def _note(config: dict[str, Any], rank: int, made: Callable[[int], None]) -> None:
    """How long a step took, once all are there: they begin within milliseconds of each other."""
    rounds = config["rounds"]
    folder = Path(config["folder"])
    (folder / f"here-{rank}").touch()
    while len([*folder.glob("here-*")]) < config["workers"]:
        time.sleep(0.001)
    made(1)
    began = time.monotonic()
    for step in range(2, config["steps"] + 2):
        if rounds:
            _work(rounds)
        else:
            time.sleep(STEP_S)
        made(step)
    took = (time.monotonic() - began) / config["steps"]
    (folder / f"rank-{rank}.json").write_text(json.dumps(took))


def _work(rounds: int) -> int:
    found = 0
    for number in range(rounds):
        found += number
    return found


def rounds_of_a_step() -> int:
    """How much work keeps a processor busy for a step, at its best."""
    rounds, best = 100_000, float("inf")
    for _ in range(20):
        began = time.perf_counter()
        _work(rounds)
        best = min(best, time.perf_counter() - began)
    return int(rounds * STEP_S / best)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    _note(order, int(os.environ["RANK"]), lambda step: None)
